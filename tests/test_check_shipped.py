"""What comes with the service keeps the contract that its check asks of others."""

import asyncio
import json
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from rollout_svc.checking.check import check_agent, check_judger
from rollout_svc.errors import ConfigError
from tests.support.reward_service import Said, reward_service

PROJECT = Path(__file__).parent.parent / "pyproject.toml"

if not PROJECT.is_file():
    pytest.skip("the plugins are read from pyproject.toml, which is not installed", allow_module_level=True)

TABLES = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
AGENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "single_turn": ((), ()),
    "multi_turn": (('environment="tests.support.nudging:Nudging"',), ()),
    "tools": (('tools=["tests.support.tools:weather"]',), (CALL, CALL + CALL, "Cold.")),
}
"""Options by which each can be tried, and what the model says."""
EXACT = {"path": "rollout_judgers.exact:Exact"}
REGEX = {"path": "rollout_judgers.regex:Regex", "pattern": "(\\d+)"}
JUDGERS: dict[str, tuple[str, ...]] = {
    "exact": (),
    "regex": ("pattern=(\\d+)",),
    "function": ('function="tests.support.judgers:awaited"',),
    "reported": (),
    "code": ("test_timeout_s=2.0",),
    "math": (),
    "http": ("url=SERVICE/judge",),
    "llm": ("base_url=SERVICE/v1", "model=judge", "rubric=Is {response} right?"),
    "composed": ("parts=" + json.dumps({"same": EXACT, "number": {**REGEX, "weight": 0.5}}),),
    "router": ("routes=" + json.dumps({"check": REGEX}), "default=" + json.dumps(EXACT)),
}
"""The same, for judgers; SERVICE is the address of one that answers."""
TRUTHS = {"code": {"function": "double", "cases": [{"args": [2], "expected": 4}]}}
"""Ground truths that are no sums."""
ELSEWHERE = {"session": "its turns come over HTTP from a process or a client: tests/service/test_session_*.py"}
"""Those that need more than options, and where they are tried."""
VERDICT = {"reward": 0.5, "choices": [{"message": {"content": "Score: 1"}}]}


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """An address that answers every judger that asks one; in a thread with a loop of its own."""
    address: Future[str] = Future()
    over: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        async with reward_service(Said(VERDICT)) as answering:
            end = asyncio.Event()
            over.set_result((asyncio.get_running_loop(), end))
            address.set_result(answering.url)
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield address.result(10)
    loop, end = over.result(10)
    loop.call_soon_threadsafe(end.set)
    thread.join(10)
    assert not thread.is_alive()


def test_every_plugin_is_tried() -> None:
    """One that is added has to be checked, here or elsewhere."""
    assert TABLES["rollout_svc.agents"].keys() == {*AGENTS, *ELSEWHERE}
    assert TABLES["rollout_svc.judgers"].keys() == {*JUDGERS}


@pytest.mark.parametrize("name", AGENTS)
def test_shipped_loops_pass(name: str) -> None:
    """Every agent loop of the package."""
    options, turns = AGENTS[name]
    report = check_agent(TABLES["rollout_svc.agents"][name], options=options, turns=turns)
    assert report.findings == ()
    assert report.tries > 0


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_cannot_be_tried_is_said(name: str) -> None:
    """One line, exit code 2: it is not told as something that is wrong with the loop."""
    with pytest.raises(ConfigError, match="its turns come over HTTP"):
        check_agent(TABLES["rollout_svc.agents"][name])


@pytest.mark.parametrize("name", JUDGERS)
def test_shipped_judgers_pass(name: str, tmp_path: Path, service: str) -> None:
    """Every judger of the package."""
    prompt = tmp_path / "prompt.jsonl"
    prompt.write_text(json.dumps({"text": "2 + 2 = ?", "ground_truth": TRUTHS.get(name, "4")}))
    options = [option.replace("SERVICE", service) for option in JUDGERS[name]]
    target = TABLES["rollout_svc.judgers"][name]
    report = check_judger(target, options=options, prompt=prompt, deterministic=True)
    assert report.findings == ()
    assert report.tries > 0
