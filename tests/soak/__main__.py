"""Run the loop for a long time and say whether anything grew: `python -m tests.soak --steps 1000 --pauses 1000`.

Two engines of a mixture of experts, the service, and a trainer that replays the routing, each a process. First trainer
steps: a batch is taken, the stage paused with requests under way, the weights moved, the stage resumed, the batch
trained on. Then pauses and resumes, each with requests under way.

Exit codes: 0 nothing grew and every handle had its owner; 1 something did not hold; it is named.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import yaml

from rollout_svc.demo import DemoOptions
from rollout_svc.demo.files import RunFiles, service_config
from rollout_svc.demo.grpo import GrpoOptions, GrpoTrainer, collate_tensors
from rollout_svc.demo.options import MOE
from rollout_svc.demo.processes import Children
from rollout_svc.demo.task import VOCABULARY, SortTask
from rollout_svc.embedded.model import build, preset
from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.chaos.leaks import resident_bytes
from tests.soak.account import Account, Book, Sight, resident_of
from tests.soak.heap import heap

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES: Final = 2
GROUPS: Final = 4
GROUP_SIZE: Final = 4
TASK: Final = SortTask(length=4, symbols=4, max_tokens=24)
PER_TOKEN: Final = ("input_ids", "attention_mask", "loss_mask", "logprobs")
"""Tensors of a batch that are as wide as its longest sequence, and that the trainer reads."""
LR: Final = 1e-4
"""Small: the policy stays near guessing, whose answers are long enough to be under way at a pause."""
START_TIMEOUT_S: Final = 90.0
TAKE_TIMEOUT_S: Final = 60.0
UNDER_WAY_S: Final = 5.0
"""For requests to be under way again after a resume: some milliseconds, unless the buffer is full."""
PAUSE_DEADLINE_S: Final = 10.0
TELL_S: Final = 5.0
"""Between two lines of progress."""


@dataclass(slots=True)
class Soak:
    """A running stage and its trainer."""

    client: SyncRolloutClient
    trainer: GrpoTrainer
    files: RunFiles
    children: Children
    engines: list[int]
    book: Book
    account: Account
    cut: int = 0
    told: float = field(default_factory=time.monotonic)

    def step(self, step: int) -> None:
        """One trainer step; the weights it moves are those of the step before."""
        batch = self.client.take_batch(step, GROUPS, TAKE_TIMEOUT_S, tensors=True)
        path = self.files.save_weights(self.trainer.model, step + 1)
        report = self.client.pause(deadline_s=PAUSE_DEADLINE_S)
        self.client.update_weights(step + 1, {"kind": "disk", "path": str(path)})
        self._note(report)
        self.client.resume(report["ticket"], weight_version=step + 1)
        stats = self.trainer.step(collate_tensors(_padded(batch["tensors"])))
        if "routed_experts" not in batch["tensors"]:
            self.account.break_("a batch came without routed experts")
        if step == 0 and abs(stats.ratio - 1) > 1e-3:  # made and replayed with the same weights
            self.account.break_(f"the replayed ratio of the first batch is {stats.ratio}, not 1")

    def flap(self, step: int) -> None:
        """One pause and resume amid requests; a batch is consumed so that there is room for more."""
        self.client.take_batch(step, GROUPS, TAKE_TIMEOUT_S, [self.client.unacked or ""], tensors=True)
        report = self.client.pause(deadline_s=PAUSE_DEADLINE_S)
        self._note(report)
        self.client.resume(report["ticket"])

    def _note(self, report: dict[str, Any]) -> None:
        if not report["clean"]:
            self.account.break_(f"pause {report['ticket']} abandoned {len(report['abandoned'])} requests")
        self.cut += sum(worker["in_flight"] for worker in report["workers"].values())
        held = self.book.of(report["ticket"])
        engines = tuple(resident_of(pid) for pid in self.engines)
        self.account.add(Sight(held, engines, resident_bytes(), heap().bytes))

    def tell(self, what: str, done: int, wanted: int) -> None:
        """A line of progress, now and then."""
        now = time.monotonic()
        if now - self.told >= TELL_S or done == wanted:
            self.told = now
            _say(f"{what} {done}/{wanted}  {self.account.latest()}  cut off {self.cut}")


def run(steps: int, pauses: int, out: Path) -> int:
    """Soak; returns the exit code."""
    torch.set_num_threads(1)
    options = DemoOptions(out=out, task=TASK, model=MOE)
    files, book = RunFiles(out), Book(out / "book.jsonl")
    files.prepare(options)
    book.path.unlink(missing_ok=True)  # of a run before this one
    model = build(preset(MOE, vocab_size=len(VOCABULARY), context=TASK.context), 0)
    account = Account()
    gc.collect()
    gc.freeze()  # what was imported lives as long as the process, and would be walked through at every step
    with Children(files.logs) as children:
        engines = _engines(children, files, options, files.save_weights(model, 0))
        _write_config(files, options, [url for url, _ in engines])
        service = children.start("service", "service", "tests.soak.watched", [str(files.config), str(book.path)])
        children.wait_ready([service], START_TIMEOUT_S, _say)
        with SyncRolloutClient(service.url) as client:
            trainer = GrpoTrainer(model, GrpoOptions(lr=LR))
            soak = Soak(client, trainer, files, children, [pid for _, pid in engines], book, account)
            for step in range(steps):
                soak.step(step)
                soak.tell("steps", step + 1, steps)
            account.close("steps")
            for number in range(pauses):
                soak.flap(steps)
                soak.tell("pauses", number + 1, pauses)
            account.close("pauses")
            children.check()
    account.stopped(book.last())
    if not soak.cut:
        account.break_("no pause met a request under way")
    _say(account.table())
    return 1 if account.broken else 0


def _padded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad a batch to the context, whatever its longest sequence: torch keeps kernels for every shape it has met."""
    more = TASK.context - tensors["input_ids"].shape[1]
    return {
        name: torch.nn.functional.pad(tensor, (0, more)) if name in PER_TOKEN else tensor
        for name, tensor in tensors.items()
    }


def _engines(children: Children, files: RunFiles, options: DemoOptions, weights: Path) -> list[tuple[str, int]]:
    """Start the engines; returns address and process of each."""
    common = ["--tokenizer", str(files.tokenizer), "--context", str(options.task.context), "--weights", str(weights)]
    started = [
        children.start(
            f"engine-{index}",
            "engine",
            "rollout_svc",
            ["engine", "--port", "0", "--model", options.model, "--seed", str(index), *common],
        )
        for index in range(ENGINES)
    ]
    children.wait_ready(started, START_TIMEOUT_S, _say)
    return [(child.url, _led_by(child.process.pid)) for child in started]


def _led_by(leash: int) -> int:
    """The process that a leash holds."""
    return int(Path(f"/proc/{leash}/task/{leash}/children").read_text().split()[0])


def _write_config(files: RunFiles, options: DemoOptions, urls: Sequence[str]) -> None:
    """The demo's service, with small batches, and room for requests that are under way when a pause comes."""
    config = service_config(
        options, [{"url": url, "dialect": "sglang"} for url in urls], str(files.tokenizer.resolve())
    )
    config["trainer"] |= {"train_batch_size": GROUPS, "prompt_repeat_k": GROUP_SIZE, "max_staleness": 4}
    config["memory"] = {"debug": True}
    files.config.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run from command-line flags; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="trainer steps")
    parser.add_argument("--pauses", type=int, default=1000, help="pauses and resumes after them")
    parser.add_argument("--out", type=Path, default=None, help="keep what the run writes here")
    given = parser.parse_args()
    if given.out is not None:
        return run(given.steps, given.pauses, given.out)
    with tempfile.TemporaryDirectory(prefix="soak-") as out:
        return run(given.steps, given.pauses, Path(out))


if __name__ == "__main__":
    sys.exit(main())
