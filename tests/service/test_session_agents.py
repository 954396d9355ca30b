"""Agents that the service runs itself: callables and commands, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_agents import session
from rollout_svc.agent import work
from rollout_svc.errors import ConfigError
from rollout_svc.service import RolloutService
from rollout_svc.sessions import registry
from tests.support.fake_sglang import Reply
from tests.support.session_site import SESSION, Site, ids, session_site
from tests.support.stage import make_config

AGENTS = "tests.support.session_agents"
ONCE = {"max_attempts": 1}


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_LOOK_S", 0.02)
    monkeypatch.setattr(work, "_LINGER_S", 0.05)
    monkeypatch.setattr(session, "_END_S", 1.0)  # all of it is kept for the kill


def shell(script: str) -> dict[str, Any]:
    """An agent that is a line of Python."""
    return {"command": [sys.executable, "-c", script]}


async def only_response(site: Site) -> list[int]:
    """The tokens of the one sample of the next batch."""
    [group] = (await site.stage.take())["groups"]
    [sample] = group["samples"]
    response: list[int] = sample["response_ids"]
    return response


@pytest.mark.parametrize(
    ("agent", "response"),
    [
        ({"call": f"{AGENTS}:ask_twice"}, "yo;<u>on;<a>yo"),
        ({"call": f"{AGENTS}:ask"}, "yo"),
        (
            shell(
                f"import os, json; from {AGENTS} import ask; told = os.environ;"
                "ask(told['OPENAI_BASE_URL'], told['OPENAI_API_KEY'], json.loads(told['ROLLOUT_PROMPT']))"
            ),
            "yo",
        ),
    ],
    ids=["async", "sync", "command"],
)
async def test_an_agent_is_run_with_its_base_url_and_key(agent: dict[str, Any], response: str) -> None:
    """Asynchronous, blocking or a command: its turns are the sample."""
    async with session_site(agent=agent) as site:
        site.engine.answer = lambda _: Reply(tokens=ids("yo"))
        assert await only_response(site) == ids(response)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        ({"call": f"{AGENTS}:break_down"}, ["exit code 1: ValueError: no idea", "session_agents.py:"]),
        (shell("import sys; print('half way'); sys.exit(3)"), ["ended with exit code 3: half way"]),
        (shell("import os; os.kill(os.getpid(), 9)"), ["was ended by SIGKILL"]),
        (shell("0"), ["the agent returned without a turn"]),
        ({"call": f"{AGENTS}:break_down_inside"}, ["RuntimeError: inside", "session_agents.py:"]),
        ({"call": f"{AGENTS}:leave"}, ["it called exit(4)"]),
    ],
    ids=["sync", "command", "killed", "idle", "async", "exits"],
)
async def test_an_agent_that_fails_fails_its_sample_with_its_last_words(agent: dict[str, Any], said: list[str]) -> None:
    """P2: `agent_error`, with how it ended and what it said; nothing else notices."""
    async with session_site(agent=agent, producer=ONCE) as site:
        await site.stage.until(lambda: site.stage.groups("failed") == 1)
        assert site.stage.parts.tally.failed == {"agent_error": 1}
        for words in said:
            assert words in str(site.stage.parts.tally.last_failure)


@pytest.mark.parametrize("call", ["hold_on", "hang"])
async def test_an_agent_that_never_returns_is_ended(call: str) -> None:
    """P21: after `timeout_s`, the asynchronous one that swallows its cancellation too."""
    agent = {"call": f"{AGENTS}:{call}", "timeout_s": 0.3}
    async with session_site(agent=agent, producer=ONCE) as site:
        await site.stage.until(lambda: site.stage.groups("failed") == 1)
        assert site.stage.parts.tally.failed == {"agent_timeout": 1}
        assert site.figures["open"] == 0


def alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something that nobody tells of happens in time."""
    for _ in range(int(seconds * 100)):
        if holds():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_nothing_of_an_agent_outlives_its_service(tmp_path: Path) -> None:
    """P21: neither a process that ignores SIGTERM, nor its child in a session of its own."""
    note = tmp_path / "pids"
    async with session_site(0, agent={"call": f"{AGENTS}:leave_children"}) as site:
        await site.stage.push([{"messages": [{"role": "user", "content": str(note)}]}])
        assert await soon(note.exists)
        pids = [int(word) for word in note.read_text().split()]
        assert all(map(alive, pids))
    assert await soon(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        ({"call": "nowhere:agent"}, "No module named 'nowhere'"),
        ({"call": f"{AGENTS}:wants_too_much"}, "parameter 'budget' is none of base_url, api_key, prompt, sample_id"),
        ({"call": f"{AGENTS}:ask", "command": ["true"]}, "call or command, not both"),
        ({"command": ["no-such-program-here"]}, "no program 'no-such-program-here'"),
        ({"timeout_s": 0}, "positive"),
    ],
)
def test_an_agent_that_cannot_be_run_is_refused_at_once(agent: dict[str, Any], why: str) -> None:
    """P35: with the path of the agent's setting."""
    with pytest.raises(ConfigError, match=r"tasks\.0\.agent: ") as refused:
        RolloutService(make_config(agent={"path": SESSION} | agent))
    assert why in str(refused.value)


def test_the_agent_has_a_name() -> None:
    """`agent: {name: session}`, by its entry point."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("the project's own table is not here")
    table = tomllib.loads(project.read_text())["project"]["entry-points"]["rollout_svc.agents"]
    assert table["session"] == SESSION
