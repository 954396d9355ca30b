"""The examples of agents and judgers, run as they are against a real service and the built-in engine."""

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.long.test_examples import EXAMPLES, ROOT, free_port, start

PLUGINS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


def target_of(kind: str, name: str) -> str:
    """The `module:attr` of a plugin of the package."""
    return str(PLUGINS[f"rollout_svc.{kind}"][name])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine for all of them, with what each example would have it say."""
    said = ""
    for script in (["word_problems.py", "64"], ["code_tasks.py"]):
        command = [sys.executable, *script]
        said += subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=20, check=True).stdout
    path = tmp_path_factory.mktemp("script") / "script.jsonl"
    path.write_text(said)
    with running("engine", "--port", 0, "--script", path, word="engine.ready") as url:
        yield url


@contextmanager
def served(folder: Path, config: str, engine: str, **names: str) -> Iterator[SyncRolloutClient]:
    """Run an example: the service with its configuration, and what lies beside it."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, folder)
    settings: dict[str, Any] = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    for part, target in names.items():  # what is installed may be older than what is tested
        plugin = settings["tasks"][0][part]
        assert plugin.pop("name")
        plugin["path"] = target
    settings["service"] = {"port": free_port()}
    settings["trainer"]["max_staleness"] = 20  # nobody trains here, and no version follows
    settings["workers"][0]["url"] = engine
    (folder / config).write_text(yaml.safe_dump(settings))
    with (
        running("serve", "--config", folder / config, "--log-level", "warning", word="service.ready") as at,
        SyncRolloutClient(at) as client,
    ):
        yield client


@contextmanager
def running(*command: object, word: str) -> Iterator[str]:
    """A part, as long as it is needed; gives its address."""
    process, url = start(*command, word=word)
    try:
        yield url
    finally:
        process.terminate()
        ended = process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
        assert ended == 0


@pytest.mark.timeout(120)
def test_a_model_with_a_calculator_solves_word_problems(tmp_path: Path, engine: str) -> None:
    """Story, call, what the tool said, answer: every token of it in one conversation, the model's own masked in."""
    target = target_of("agents", "tools")
    with served(tmp_path, "calculator.yaml", engine, agent=target) as client:
        batch = client.take_batch(step=0, groups=4, timeout_s=60)
    samples = [sample for group in batch["groups"] for sample in group["samples"]]
    assert [sample["reward"] for sample in samples] == [1.0] * 8
    for sample in samples:
        told = sample["response"]
        assert "<tool_call>" in told
        assert "The answer is" in told.rpartition("<|assistant|>")[2]
        own = bytes(
            token
            for token, mask in zip(sample["response_ids"], sample["loss_mask"], strict=True)
            if mask and token < 256
        ).decode()
        assert own.startswith('<tool_call>{"name": "calculate"')
        assert "<|tool|>" in told
        assert "<|tool|>" not in own  # what the tool said is not the model's


@pytest.mark.timeout(120)
def test_an_agent_of_openais_client_solves_word_problems(tmp_path: Path, engine: str) -> None:
    """Its calls and answers are the sample, token for token; it never heard of tokens."""
    target = target_of("agents", "session")
    with served(tmp_path, "session.yaml", engine, agent=target) as client:
        batch = client.take_batch(step=0, groups=1, timeout_s=60)
    samples = [sample for group in batch["groups"] for sample in group["samples"]]
    assert [sample["reward"] for sample in samples] == [1.0] * 2
    for sample in samples:
        assert "earlier_segments" not in sample  # one conversation, in which every turn went on from the last
        assert sample["response"].startswith('<tool_call>{"name": "calculate"')
        assert "The answer is" in sample["response"].rpartition("<|assistant|>")[2]
        assert 0 < sum(sample["loss_mask"]) < len(sample["loss_mask"])


@pytest.mark.timeout(120)
def test_code_is_worth_the_tests_that_it_passes(tmp_path: Path, engine: str) -> None:
    """Right, right, half right, and one that never ends: it is killed, and the others do not notice."""
    target = target_of("judgers", "code")
    rewards: dict[str, float] = {}
    with served(tmp_path, "code.yaml", engine, judger=target) as client:
        for step in range(10):  # what takes longer comes later
            batch = client.take_batch(step=step, groups=2, timeout_s=60)
            for group in batch["groups"]:
                name = group["prompt"]["id"].rpartition("-")[0]
                assert rewards.setdefault(name, group["samples"][0]["reward"]) == group["samples"][0]["reward"]
            if "forever" in rewards:
                break
    assert rewards == {"largest": 1.0, "backwards": 1.0, "vowels": 0.5, "forever": 0.0}


def test_word_problems_go_on_where_they_were(tmp_path: Path) -> None:
    """The generator keeps its position, and the same number is the same problem in every process."""
    code = (
        "import json, word_problems as w\n"
        "one = w.WordProblems(); lines = iter(one); first = [next(lines) for _ in range(5)]\n"
        "state = json.loads(json.dumps(one.state())); more = next(lines)\n"
        "two = w.WordProblems(); two.restore(state)\n"
        "assert next(iter(two)) == more and more not in first\n"
        "assert all(str(eval(line['meta']['sum'])) == line['ground_truth'] for line in first)\n"
        "print(json.dumps(first))\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=20, check=True
        )
        for _ in range(2)
    ]
    assert told[0].stdout == told[1].stdout
    assert len({line["id"] for line in json.loads(told[0].stdout)}) == 5
