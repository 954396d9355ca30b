"""Tools and environments that are not async, in real processes: killed in time, with all they started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_agents.multi_turn import MultiTurn
from rollout_agents.tools import Tools
from rollout_svc.chat_template import ChatTemplate
from rollout_svc.errors import SampleFailure
from rollout_svc.judging.processes import JudgePool
from rollout_svc.tokens import ByteTokenizer
from tests.support.caller import Step, Table, answer
from tests.support.groups import make_prompt
from tests.support.processes import lives, until

WAIT_S = 20.0
ENVIRONMENTS = "tests.support.environments:"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """A loop for all tests: the processes belong to it."""
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pool(runner: asyncio.Runner) -> Iterator[JudgePool]:
    """Two processes for all tests."""
    made = JudgePool(2)
    yield made
    runner.run(made.close())


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe by which a tool says where it runs."""
    path = tmp_path / "pids"
    os.mkfifo(path)
    return path


def set_table(pool: JudgePool, *script: Step) -> Table:
    """Set a table with processes."""
    table = Table(*script, max_tokens=500, on_pause="park")
    table.processes = pool
    table.tokenizer = ByteTokenizer(ChatTemplate(TEMPLATE, {}).render)
    table.prompt = make_prompt(content=[{"role": "user", "content": "hello"}], ground_truth="seven")
    return table


async def run(agent: Any, table: Table) -> None:
    """Run a loop to its end, clean-up included."""
    context = table.context()
    try:
        async with asyncio.timeout(WAIT_S):
            await agent.run(table.sample, context)
    finally:
        await context.work.close()


def says(*calls: tuple[str, str]) -> Step:
    """A turn of the model with calls of tools."""
    written = [f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' for name, arguments in calls]
    return answer(list("".join(written).encode()))


def tools(*names: str, **options: Any) -> Tools:
    """The loop with some tools."""
    return Tools(tools=[f"tests.support.tools:{name}" for name in names], **options)


def told(table: Table) -> str:
    """All that was said."""
    return bytes(table.sample.response_ids).decode()


def test_a_plain_function_runs_elsewhere(runner: asyncio.Runner, pool: JudgePool) -> None:
    """Its answer comes back as text; one that exits has told the model so, and where for people."""
    table = set_table(pool, says(("add", '{"a": 2}'), ("pid", "{}"), ("exits", '{"code": 3}')), answer([65]))
    runner.run(run(tools("add", "pid", "exits"), table))
    assert "<tool>3<tool>" in told(table)
    assert f"<tool>{os.getpid()}<" not in told(table)
    assert "error: exits: SystemExit: 3" in told(table)
    assert "tools.py:" in table.sample.meta["tool_errors"][0]


def test_an_environment_goes_on_in_any_process(runner: asyncio.Runner, pool: JudgePool, tmp_path: Path) -> None:
    """Between its calls it is a pickle: it counts on, is closed with what it has, and its rewards add up."""
    written = tmp_path / "closed"
    options = {"until": 3, "written": str(written)}
    agent = MultiTurn(environment=f"{ENVIRONMENTS}Counting", environment_options=options)
    table = set_table(pool, answer([65]), answer([66]), answer([67]))
    runner.run(run(agent, table))
    assert bytes(table.sample.prompt_ids) == b"<user>count for seven>"
    assert (table.sample.meta["turns"], table.sample.meta["reported_reward"]) == (3, 1.5)
    assert written.read_text() == "closed after 3"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unpicklable", "environment_error: .*Unruly.reset: between its calls it is a pickle"),
        ("raises", r"environment_error: .*Unruly.step: ValueError: as told \(.*environments.py:\d+ in step\)"),
        ("exits", r"environment_error: .*Unruly.step: SystemExit: 3 \(.*environments.py:\d+ in step\)"),
    ],
)
def test_what_goes_wrong_there_is_typed(runner: asyncio.Runner, pool: JudgePool, how: str, words: str) -> None:
    """The sample fails with the reason, and the file and line."""
    agent = MultiTurn(environment=f"{ENVIRONMENTS}Unruly", environment_options={"how": how})
    with pytest.raises(SampleFailure, match=words):
        runner.run(run(agent, set_table(pool, answer([65]))))


def test_a_hung_step_is_killed_at_its_time(runner: asyncio.Runner, pool: JudgePool, fifo: Path) -> None:
    """P21: the failure says where it hung."""
    agent = MultiTurn(environment=f"{ENVIRONMENTS}Hangs", environment_options={"fifo": str(fifo)}, max_step_s=0.5)

    async def check() -> int:
        running = asyncio.ensure_future(run(agent, set_table(pool, answer([65]))))
        pid = int(await asyncio.to_thread(fifo.read_text))
        with pytest.raises(
            SampleFailure, match=r"environment_timeout: .*not done in 0.5 s \(.*environments.py:\d+ in \w+\)$"
        ):
            await running
        return pid

    pid = runner.run(check())
    until(lambda: not lives(pid), "the process is gone")


def test_a_hung_tool_is_killed_with_what_it_started(runner: asyncio.Runner, pool: JudgePool, fifo: Path) -> None:
    """P21: at its timeout, and its child too; the other call of the turn is not held up, and the model goes on."""

    async def check() -> list[int]:
        script = says(("forks", f'{{"fifo": "{fifo}"}}'), ("add", '{"a": 4}')), answer([65])
        table = set_table(pool, *script)
        hung = {"path": "tests.support.tools:forks", "timeout_s": 0.5}
        agent = Tools(tools=[hung, "tests.support.tools:add"])  # the other has its time, however busy the machine is
        running = asyncio.ensure_future(run(agent, table))
        pids = [int(line) for line in (await asyncio.to_thread(fifo.read_text)).split()]
        await running
        assert "error: forks: no answer in 0.5 s" in told(table)
        assert "<tool>5>" in told(table)
        assert table.sample.meta["tool_problems"] == {"timeout": 1}
        return pids

    pids = runner.run(check())
    until(lambda: not any(map(lives, pids)), "both are gone")


def test_a_hung_tool_is_killed_when_its_sample_is_taken_back(
    runner: asyncio.Runner, pool: JudgePool, fifo: Path
) -> None:
    """P10 P14: whoever ends the loop has ended its tool, and the next call finds a process."""

    async def check() -> list[int]:
        table = set_table(pool, says(("forks", f'{{"fifo": "{fifo}"}}')))
        running = asyncio.ensure_future(run(tools("forks"), table))
        pids = [int(line) for line in (await asyncio.to_thread(fifo.read_text)).split()]
        table.hand_back()
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        after = set_table(pool, says(("add", '{"a": 4}')), answer([65]))
        await run(tools("add"), after)
        assert "<tool>5>" in told(after)
        return pids

    pids = runner.run(check())
    until(lambda: not any(map(lives, pids)), "both are gone")


SERVICE = """
import asyncio, sys
from rollout_svc.judging.processes import JudgePool
from tests.agents.test_processes import run, says, set_table, tools

async def main(fifo):
    table = set_table(JudgePool(1), says(("forks", '{"fifo": "%s"}' % fifo)))
    await run(tools("forks"), table)

asyncio.run(main(sys.argv[1]))
"""


def test_a_killed_service_leaves_no_tool(fifo: Path) -> None:
    """After a kill -9 in the middle of a tool, neither its process is left nor what that started."""
    service = subprocess.Popen([sys.executable, "-c", SERVICE, str(fifo)])
    try:
        pids = [int(line) for line in fifo.read_text().split()]
        assert all(map(lives, pids))
        service.send_signal(signal.SIGKILL)
        until(lambda: not any(map(lives, pids)), "both are gone")
    finally:
        service.kill()
        service.wait()
