"""The engine as a process: start, prompt control under load, and every way it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from rollout_svc.embedded.model import WEIGHTS_FILE, build, preset, save_weights
from rollout_svc.embedded.run import main
from tests.embedded.helpers import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

START_S = 50.0
STOP_S = 10.0
COMMAND = (sys.executable, "-m", "rollout_svc.embedded", "--port", "0")

PING_MEDIAN_S = 0.05
"""A step of 64 takes about 1 ms and gives the interpreter up at every operation; the rest is two cores shared with the
client and whatever else runs there."""

CONTROL_MAX_S = 0.5
"""Far below the seconds that the 64 requests take: a call that waited for them would break it."""


@asynccontextmanager
async def engine_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run an engine, and yield its process and URL."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *flags, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("engine.ready url=http://127.0.0.1:")
        yield process, line.split("url=")[1].strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def timed(session: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> float:
    """Call a route, and return how long its answer took."""
    began = time.monotonic()
    async with session.request(method, url, json=body) as response:
        await response.read()
        assert response.status == 200
    return time.monotonic() - began


async def test_control_is_prompt_while_64_requests_run() -> None:
    """Pings and an abort of all are answered at once amid 64 running requests; SIGTERM then exits 0."""
    async with engine_process("--max-running", "64") as (process, url), aiohttp.ClientSession(url) as session:
        sampling = {"max_new_tokens": 1000, "ignore_eos": True}

        async def generate(rid: str) -> dict[str, Any]:
            body = {"rid": rid, "input_ids": [1, 2, 3], "sampling_params": sampling}
            async with session.post("/generate", json=body) as response:
                answer: dict[str, Any] = await response.json()
                return answer

        tasks = [asyncio.create_task(generate(f"r{index}"), name=f"r{index}") for index in range(64)]
        running = 0
        async with asyncio.timeout(STOP_S):
            while running < 64:
                async with session.get("/v1/loads") as response:
                    running = (await response.json())["loads"][0]["num_running_reqs"]
        delays = [await timed(session, "GET", "/ping") for _ in range(30)]
        assert not any(task.done() for task in tasks)
        abort_s = await timed(session, "POST", "/abort_request", {"abort_all": True})
        answers = await asyncio.gather(*tasks)
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
        assert all(0 < len(answer["output_ids"]) < 1000 for answer in answers)
        assert median(delays) < PING_MEDIAN_S
        assert max(*delays, abort_s) < CONTROL_MAX_S
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            assert await process.wait() == 0


async def test_sigint_answers_what_is_in_flight() -> None:
    """An interrupted engine gives its requests their partial output, and exits 0."""
    async with engine_process() as (process, url), aiohttp.ClientSession(url) as session:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True}}
        posts = [asyncio.create_task(session.post("/generate", json=body), name=f"p{index}") for index in range(8)]
        running = 0
        while not running:
            async with session.get("/v1/loads") as response:
                running = (await response.json())["loads"][0]["num_running_reqs"]
        process.send_signal(signal.SIGINT)
        for post in posts:
            async with await post as response:
                assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"
        async with asyncio.timeout(STOP_S):
            assert await process.wait() == 0


PARENT = """
import subprocess, sys
child = subprocess.Popen([*sys.argv[1:]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
sys.stdin.read()
"""


async def test_an_engine_dies_with_its_parent() -> None:
    """With the flag, an engine whose parent is killed ends by itself and frees its port."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PARENT,
        *COMMAND,
        "--die-with-parent",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None
    async with asyncio.timeout(START_S):
        line = (await parent.stdout.readline()).decode().split()
    url, child = line[1].removeprefix("url="), int(line[2])
    parent.kill()
    await parent.communicate()
    try:
        async with asyncio.timeout(STOP_S), aiohttp.ClientSession() as session:
            while True:
                try:
                    await session.get(f"{url}/ping")
                except aiohttp.ClientConnectionError:
                    break
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise


async def test_flags_choose_the_vocabulary_the_weights_and_the_seed(tmp_path: Path) -> None:
    """Weights saved by a trainer on the tokenizer's vocabulary are those that the engine serves."""
    write_tokenizer(tmp_path, **{"?": 0, "a": 1, "b": 2})
    save_weights(build(preset("tiny", vocab_size=4, context=40), 5), tmp_path)
    body = {"text": "a b", "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}}
    answers = []
    common = ("--tokenizer", str(tmp_path), "--context", "40")
    for flags in (("--weights", str(tmp_path)), ("--seed", "5"), ("--seed", "6")):
        async with engine_process(*common, *flags) as (_, url), aiohttp.ClientSession(url) as session:
            async with session.post("/generate", json=body) as response:
                answers.append((await response.json())["output_ids"])
            async with session.get("/model_info") as response:
                info = await response.json()
    assert answers[0] == answers[1] != answers[2]
    assert len(answers[0]) == 30
    assert (info["vocab_size"], info["context_length"], info["tokenizer_path"]) == (4, 40, str(tmp_path))


def test_a_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """The port is named, and the exit code is 2."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"engine: port {port} on 127.0.0.1 is in use\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "huge"], "unknown model 'huge'"),
        (["--max-running", "0"], "max_running must be at least 1"),
        (["--context", "0"], "context must be at least 1"),
        (["--tokenizer", "{tmp}"], "no tokenizer.json in"),
        (["--weights", "{tmp}"], f"no weights at {{tmp}}/{WEIGHTS_FILE}"),
    ],
)
def test_bad_flags_are_one_line(
    flags: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What cannot be served is named in one line, and the exit code is 2."""
    assert main([flag.format(tmp=tmp_path) for flag in flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words.format(tmp=tmp_path) in err


async def test_importing_the_package_does_not_import_torch() -> None:
    """Only the engine's own modules pay for torch."""
    code = "import sys, rollout_svc, rollout_svc.embedded, rollout_svc.embedded.run; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


async def test_a_mixture_of_experts_is_served_by_its_name() -> None:
    """As users start it; asked not to, it tells nobody its routing."""
    flags = ("--model", "tiny-moe", "--no-enable-return-routed-experts")
    async with (
        engine_process(*flags) as (_, url),
        aiohttp.ClientSession(url) as session,
        session.get("/server_info") as response,
    ):
        info = await response.json()
    assert (info["served_model_name"], info["num_experts"]) == ("tiny-moe", 8)
    assert info["enable_return_routed_experts"] is False
