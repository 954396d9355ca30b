"""What the benches stand on: the canned engine answers whole bodies, the floor counts right, children are ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import pytest

from bench.floor import Floor, abort_and_read, measure
from bench.process import Child, ChildFailedError, cpu_time_s

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = {"input_ids": list(range(128)), "return_logprob": True}


@pytest.fixture(scope="module")
def quick() -> Iterator[str]:
    """A canned engine that answers almost at once."""
    with Child("bench.canned", "--delay", 0.01, "--vocab", 1000) as child:
        yield f"http://127.0.0.1:{child.ready_line[0]}"


@pytest.fixture
def holding() -> Iterator[str]:
    """A canned engine that holds everything until it is aborted."""
    with Child("bench.canned", "--hold", "--partial-tokens", 100) as child:
        yield f"http://127.0.0.1:{child.ready_line[0]}"


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    """Status and decoded answer."""
    async with session.post(url, json=body) as response:
        raw = await response.read()
        return response.status, orjson.loads(raw) if raw.startswith(b"{") else raw.decode()


async def look(session: aiohttp.ClientSession, url: str) -> Any:
    """Decoded answer of a GET."""
    async with session.get(url) as response:
        raw = await response.read()
        return orjson.loads(raw) if raw.startswith(b"{") else raw.decode()


@pytest.mark.parametrize(
    ("budget", "tokens", "finish"),
    [(256, 256, {"type": "length", "length": 256}), (10, 10, {"type": "length", "length": 10}), (300, 256, None)],
)
async def test_a_canned_answer_is_whole(quick: str, budget: int, tokens: int, finish: dict[str, Any] | None) -> None:
    """Ids, logprobs and counts agree, the id and the prompt length are the request's own, the budget is kept."""
    async with aiohttp.ClientSession() as session:
        body = {**PROMPT, "rid": f"rid-{budget}", "sampling_params": {"max_new_tokens": budget}}
        status, answer = await post(session, quick + "/generate", body)
    meta = answer["meta_info"]
    assert status == 200
    assert meta["id"] == f"rid-{budget}"
    assert meta["prompt_tokens"] == 128
    assert len(answer["output_ids"]) == meta["completion_tokens"] == meta["output_token_logprobs_length"] == tokens
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0.0 for logprob, _, _ in meta["output_token_logprobs"])
    assert all(0 <= token < 1000 for token in answer["output_ids"])
    assert meta["finish_reason"] == finish or (finish is None and meta["finish_reason"]["type"] == "stop")


async def test_canned_control_routes(quick: str) -> None:
    """The routes a service needs are there; a new label shows in the answers; anything else is a 404."""
    async with aiohttp.ClientSession() as session:
        body = {"new_version": "7", "abort_all_requests": False}
        assert (await post(session, quick + "/update_weight_version", body))[0] == 200
        assert (await look(session, quick + "/model_info"))["weight_version"] == "7"
        _, answer = await post(session, quick + "/generate", PROMPT)
        assert answer["meta_info"]["weight_version"] == "7"
        assert (await look(session, quick + "/server_info"))["dp_size"] == 1
        assert (await look(session, quick + "/v1/loads"))["loads"][0]["num_running_reqs"] == 0
        assert await look(session, quick + "/ping") == ""
        assert (await post(session, quick + "/flush_cache", {}))[0] == 200
        assert (await post(session, quick + "/nowhere", {}))[0] == 404


async def test_canned_pause(quick: str) -> None:
    """A paused engine holds what arrives and answers it after continue."""
    async with aiohttp.ClientSession() as session:
        paused = (200, {"message": "Generation paused successfully.", "status": "ok"})
        assert await post(session, quick + "/pause_generation", {"mode": "abort"}) == paused
        call = asyncio.ensure_future(post(session, quick + "/generate", {**PROMPT, "rid": "late"}))
        while (await look(session, quick + "/v1/loads"))["loads"][0]["num_running_reqs"] == 0:
            pass
        assert not call.done()
        assert (await post(session, quick + "/continue_generation", {}))[0] == 200
        assert (await call)[1]["meta_info"]["id"] == "late"


async def test_held_generations_end_by_abort(holding: str) -> None:
    """One by its id, the rest by `abort_all`: whole answers with partial tokens; what leaves is forgotten."""
    async with aiohttp.ClientSession() as session:
        rids = ("a", "b", "c", "gone")
        calls = [asyncio.ensure_future(post(session, holding + "/generate", {**PROMPT, "rid": rid})) for rid in rids]
        while (await look(session, holding + "/v1/loads"))["loads"][0]["num_running_reqs"] < len(rids):
            pass
        assert (await post(session, holding + "/generate", {**PROMPT, "rid": "a"}))[0] == 400
        calls.pop().cancel()
        assert await post(session, holding + "/abort_request", {"rid": "b"}) == (200, "")
        assert (await calls[1])[1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert not calls[0].done()
        assert await post(session, holding + "/abort_request", {"abort_all": True}) == (200, "")
        answers = [(await call)[1] for call in calls]
        assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
        assert {len(answer["output_ids"]) for answer in answers} == {100}
        assert (await look(session, holding + "/v1/loads"))["loads"][0]["num_running_reqs"] == 0


async def test_requests_in_pieces_and_together(quick: str) -> None:
    """A request that arrives byte by byte, and two that arrive at once, are each answered."""
    port = int(quick.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    for byte in ping:
        writer.write(bytes([byte]))
        await writer.drain()
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.write(ping + ping)
    for _ in range(2):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await writer.wait_closed()


async def test_the_floor_counts_what_it_says(quick: str) -> None:
    """A measurement covers `total` requests at `in_flight`, and costs CPU."""
    result = await measure(quick, in_flight=8, total=40)
    assert (result["in_flight"], result["total"]) == (8, 40)
    assert 0.0 < result["cpu_ms_per_request"] < 100.0
    assert result["requests_per_s"] > 0.0


async def test_the_floor_parses(quick: str) -> None:
    """The floor's answer is ids with as many logprobs."""
    async with Floor(quick) as floor:
        ids, logprobs = await floor.generate()
    assert len(ids) == len(logprobs) == 256


async def test_abort_and_read(holding: str) -> None:
    """The bare pause ends, and takes time."""
    assert 0.0 < await abort_and_read(holding, 70) < 10.0


def test_a_bench_module_prints_one_json_line(quick: str) -> None:
    """`python -m bench.floor` is read by its parent as one JSON object."""
    with Child("bench.floor", "--url", quick, "--in-flight", 2, "--total", 4, ready=None) as child:
        assert child.read_json(30.0)["total"] == 4
        assert child.wait(30.0) == 0


def test_a_child_that_fails_is_quoted() -> None:
    """A child that ends before it is ready is an error with its last words."""
    with pytest.raises(ChildFailedError, match=r"ended with status 2(.|\n)*unrecognized arguments: --nonsense"):
        Child("bench.canned", "--nonsense").__enter__()


def test_a_silent_child_is_ended() -> None:
    """A child that is not ready in time is an error, and is gone."""
    child = Child("bench.canned", ready="never", timeout_s=1.0)
    with pytest.raises(ChildFailedError, match="silent"):
        child.__enter__()
    assert child.returncode is not None
    assert child.terminate() == child.returncode


def test_cpu_time_of_a_child() -> None:
    """CPU time of a child is positive and only grows; this process's own agrees with its clock."""
    with Child("bench.canned") as child:
        first = child.cpu_s
        assert 0.0 < first <= child.cpu_s
    assert cpu_time_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


def test_a_canned_engine_ends_with_its_parent() -> None:
    """An engine whose parent is killed does not stay behind."""
    parent = (
        "import time; from bench.process import Child\n"
        "with Child('bench.canned') as child: print(child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 10.0
    while _runs(pid):
        assert time.monotonic() < deadline, "the engine outlived its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - one read of a kernel file
            return file.read().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False
