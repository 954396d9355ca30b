"""The loop against a service that is played by hand: what it calls, in which order, and what it makes of answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml

from rollout_svc.config import Config
from rollout_svc.demo import DemoOptions, run_demo
from rollout_svc.demo.cluster import launched
from rollout_svc.demo.files import RunFiles, service_config
from rollout_svc.demo.grpo import GrpoOptions, GrpoTrainer
from rollout_svc.demo.live import PlainView
from rollout_svc.demo.loop import DemoLoop, answer_prompts, step_record
from rollout_svc.demo.processes import ChildFailed
from rollout_svc.demo.records import History
from rollout_svc.demo.task import END_ID, SortTask, encode
from rollout_svc.embedded.model import build, preset
from rollout_svc.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = SortTask(length=2, max_tokens=3)
WORKERS = [{"url": f"http://127.0.0.1:{port}", "dialect": "sglang"} for port in (1, 2)]
ACCOUNT = {"admitted": 1, "consumed": 1}


class PlayedService:
    """Answers as the service would, and writes down what it was asked."""

    def __init__(self, reward: float = 0.5) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.reward = reward
        self.ticket = 0
        self.weights: list[bool] = []

    def take_batch(self, step: int, groups: int, timeout_s: float, *, tensors: bool = False) -> dict[str, Any]:
        self.calls.append(("take", step))
        if tensors:
            return self._tensors(step)
        sample: dict[str, Any] = {
            "prompt_ids": encode("10="),
            "response_ids": [*encode("01"), END_ID],
            "logprobs": [-3.4, -3.4, -3.4],
            "loss_mask": [1, 1, 1],
            "reward": self.reward,
            "weight_versions": [{"version": step, "start": 0, "end": 3}],
        }
        return {
            "batch_id": f"b{step}",
            "step": step,
            "groups": [{"samples": [sample, sample]}],
            "metrics": {"aborted": 6, "continued": 4},
        }

    def _tensors(self, step: int) -> dict[str, Any]:
        self.calls[-1] += ("tensors",)
        ids = torch.tensor([[*encode("10="), *encode("01"), END_ID]] * 2)
        made = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
        return {
            "batch_id": f"b{step}",
            "samples": [{"response_length": 3}] * 2,
            "metrics": {"aborted": 6, "continued": 4},
            "tensors": {
                "input_ids": ids,
                "attention_mask": ids >= 0,
                "loss_mask": made.byte(),
                "logprobs": -3.4 * made,
                "rewards": torch.tensor([self.reward, 0.0]),
                "group_ids": torch.tensor([0, 0]),
                "routed_experts": torch.tensor([[[0, 1], [2, 3]]] * 10, dtype=torch.uint8),
                "routed_experts_offsets": torch.tensor([0, 5, 10]),
            },
        }

    def pause(self, **arguments: Any) -> dict[str, Any]:
        self.ticket += 1
        self.calls.append(("pause", self.ticket))
        worker = {"in_flight": 5, "late": 2}
        return {"ticket": self.ticket, "workers": {"w0": worker, "w1": worker}, "ledger": {"samples": ACCOUNT}}

    def update_weights(self, version: int, source: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(("weights", version))
        self.weights.append(Path(source["path"]).is_file() and source["kind"] == "disk")
        return {}

    def resume(self, ticket: int, *, weight_version: int) -> dict[str, Any]:
        if ticket != self.ticket:
            raise Conflict("an old ticket")
        self.calls.append(("resume", ticket, weight_version))
        return {}

    def ack(self, batch_id: str) -> dict[str, Any]:
        self.calls.append(("ack", batch_id))
        return {}

    def memory(self) -> dict[str, Any]:
        return {"verdict": "too early to say", "growing": [], "processes": []}

    def status(self) -> dict[str, Any]:
        return {"ledger": {"samples": ACCOUNT, "groups": ACCOUNT, "late_discarded": 0, "redone": 0}}


def make_loop(
    service: PlayedService, out: Path, steps: int, check: Callable[[], None] | None = None, model: str = "tiny"
) -> DemoLoop:
    options = DemoOptions(steps=steps, out=out, task=TASK, model=model)
    files = RunFiles(out)
    files.prepare(options)
    trainer = GrpoTrainer(build(preset(model, vocab_size=32, context=TASK.context), 0), GrpoOptions())
    with (out / "view.log").open("w") as log:
        view = PlainView(log)
        history = History(TASK.chance_reward)
        loop = DemoLoop(service, trainer, options, files, history, view, check or (lambda: None))  # type: ignore[arg-type]
        loop.run()
    return loop


def test_each_step_is_take_pause_weights_resume(tmp_path: Path) -> None:
    """In this order; the last batch is acknowledged, and the stage left paused for its account."""
    service = PlayedService()
    make_loop(service, tmp_path, steps=2)
    assert service.calls == [
        ("take", 0),
        ("pause", 1),
        ("weights", 1),
        ("resume", 1, 1),
        ("take", 1),
        ("pause", 2),
        ("weights", 2),
        ("resume", 2, 2),
        ("ack", "b1"),
        ("pause", 3),
    ]
    assert service.weights == [True, True]


def test_a_mixture_of_experts_takes_tensors_and_replays_them(tmp_path: Path) -> None:
    """The batch comes in the form that holds routed experts, and the record is made of it all the same."""
    service = PlayedService(reward=0.5)
    record = make_loop(service, tmp_path, steps=2, model="tiny-moe").history.records[0]
    assert [call for call in service.calls if call[0] == "take"] == [("take", 0, "tensors"), ("take", 1, "tensors")]
    assert (record.reward, record.tokens, record.aborted) == (0.25, 6, 6)


def test_the_newest_two_weights_stay(tmp_path: Path) -> None:
    """Disk does not grow with steps."""
    make_loop(PlayedService(), tmp_path, steps=6)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "step-0005.safetensors",
        "step-0006.safetensors",
    ]


def test_the_history_is_what_the_service_reported(tmp_path: Path) -> None:
    """Reward, aborted and continued are the batch's, in flight and ledger the pause report's."""
    loop = make_loop(PlayedService(), tmp_path, steps=3)
    record = loop.history.records[0]
    assert (record.reward, record.aborted, record.in_flight, record.continued) == (0.5, 6, 10, 4)
    assert (record.tokens, record.weight_version) == (6, 1)
    assert loop.history.ledger["samples"] == ACCOUNT
    assert list(loop.history.answers) == ["at the start", "half-way", "at the end"]


def test_a_run_ends_once_the_policy_has_learned(tmp_path: Path) -> None:
    """Not before there are steps enough to tell."""
    assert len(make_loop(PlayedService(reward=1.0), tmp_path, steps=50).history.records) == 6


def test_a_run_that_does_not_learn_uses_all_its_steps(tmp_path: Path) -> None:
    """And says so."""
    history = make_loop(PlayedService(reward=0.02), tmp_path, steps=8).history
    assert len(history.records) == 8
    assert not history.has_learned


def test_a_process_that_died_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    """The service would go on with what is left; the demo says what happened instead."""
    service = PlayedService()

    def check() -> None:
        if len(service.weights) == 2:
            raise ChildFailed("engine-1 ended with exit code 1")

    with pytest.raises(ChildFailed, match="engine-1"):
        make_loop(service, tmp_path, steps=9, check=check)
    assert len(service.weights) == 2


def test_a_pause_without_workers_is_no_crash() -> None:
    """A record can be made of a report that names nobody."""
    batch = PlayedService().take_batch(0, 1, 1.0)
    report: dict[str, Any] = {"workers": {}, "ledger": {"samples": {}}}
    assert step_record(0, batch, report, pause_s=0.0, elapsed_s=0.0).in_flight == 0


def test_answers_are_the_policys_own() -> None:
    """As many as asked, never longer than the budget, with their reward."""
    model = build(preset("tiny", vocab_size=32, context=TASK.context), 0)
    answers = answer_prompts(model, TASK, seed=5)
    assert len(answers) == 4
    assert all(0 <= one.reward <= 1 and one.prompt.endswith("=") for one in answers)
    assert answers == answer_prompts(model, TASK, seed=5)


def test_the_services_configuration_is_valid(tmp_path: Path) -> None:
    """What the demo writes is what the service reads, with the staleness it promises."""
    options = DemoOptions(out=tmp_path)
    files = RunFiles(tmp_path)
    files.prepare(options)
    files.write_config(options, WORKERS)
    written = yaml.safe_load(files.config.read_text())
    assert written == service_config(options, WORKERS, str(files.tokenizer))
    config = Config.model_validate(written)
    assert config.trainer.max_staleness == 2
    assert len(config.workers) == 2
    assert (tmp_path / "prompts.jsonl").is_file()


def test_a_mixture_of_experts_is_asked_for_its_routing(tmp_path: Path) -> None:
    """What the service is told of the experts is what the engine says of them."""
    written = service_config(DemoOptions(out=tmp_path, model="tiny-moe"), WORKERS[:1], str(tmp_path))
    experts = Config.model_validate(written).experts
    assert (experts.enabled, experts.num_experts, experts.top_k, experts.layers) == (True, 8, 2, 3)
    assert experts.moe_layers == (1, 2)
    assert "experts" not in service_config(DemoOptions(out=tmp_path), WORKERS[:1], str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"steps": 0}, "--steps"),
        ({"lr": -1.0}, "--lr"),
        ({"lr": float("nan")}, "--lr"),
        ({"seed": -1}, "--seed"),
        ({"model": "huge"}, "--model"),
        ({"cluster": "slurm"}, "--cluster"),
        ({"address": "127.0.0.1:6379"}, "--address"),
        ({"cluster": "ray", "address": "127.0.0.1:9"}, "--address: nobody listens at 127.0.0.1:9"),
        ({"cluster": "ray", "address": "ray://127.0.0.1:10001"}, "--address: ray://127.0.0.1:10001 is of Ray's client"),
        ({"cluster": "ray", "address": "head"}, "--address: expected HOST:PORT, or auto"),
    ],
)
def test_bad_options_are_one_line_and_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], flag: str
) -> None:
    """Exit code 2, the flag named, nothing written."""
    assert run_demo(DemoOptions(out=tmp_path / "out", **changes)) == 2
    error = capsys.readouterr().err
    assert error.startswith(flag)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_cluster_without_ray_is_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ray is not installed, it says so, in one line."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run_demo(DemoOptions(out=tmp_path / "out", cluster="ray")) == 2
    assert capsys.readouterr().err == "--cluster: Ray is not installed: pip install ray\n"
    assert not (tmp_path / "out").exists()


def test_engines_on_a_cluster_begin_with_weights_that_stay(tmp_path: Path) -> None:
    """The service launches them, and one that is started again finds what it was started with."""
    options = DemoOptions(out=tmp_path, cluster="ray")
    files = RunFiles(tmp_path)
    files.prepare(options)
    config = Config.model_validate(service_config(options, [launched(options, files, 0)], str(tmp_path)))
    launch = config.workers[0].launch
    assert (config.cluster is not None, launch is not None) == (True, True)
    assert launch is not None
    assert str(files.first_weights.resolve()) in launch.command_at(1, "127.0.0.2")
    model = build(preset("tiny", vocab_size=32, context=TASK.context), 0)
    files.save_first_weights(model)
    for version in range(5):
        files.save_weights(model, version)
    assert files.first_weights.is_file()


def test_a_directory_that_cannot_be_written_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("")
    assert run_demo(DemoOptions(out=tmp_path / "file" / "out")) == 2
    assert capsys.readouterr().err.startswith("--out: cannot write to")
