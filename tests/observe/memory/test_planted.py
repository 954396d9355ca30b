"""Leaks planted in a real service, in a process of its own: the watch names each, as far as `GET /v1/memory`."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from rollout_svc.rpc.client import RolloutClient
from tests.observe.memory.leaky import BYTES, LEAK, REST
from tests.support.commands import run

START_S = 60.0


@asynccontextmanager
async def leaky(kind: str) -> AsyncIterator[tuple[str, Any]]:
    """Run the process until it has taken its steps; gives its address and the warnings it logged."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.observe.memory.leaky", kind), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            url = (await process.stdout.readline()).decode().strip()
            assert url, (await process.communicate())[1].decode()
            yield url, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def warnings(process: Any) -> list[dict[str, Any]]:
    """End the process, and give the warnings about memory in its log."""
    async with asyncio.timeout(START_S):
        _, log = await process.communicate(b"")
    assert process.returncode == 0
    found = [orjson.loads(line) for line in log.splitlines() if line.startswith(b"{")]
    return [line for line in found if line["event"] == "memory.growing"]


@pytest.mark.parametrize(
    ("kind", "account"), [("handles", "handles.experts"), ("heap", "python_heap"), ("disk", "open_files")]
)
async def test_a_planted_leak_is_named(kind: str, account: str) -> None:
    """Tensors, a plain list, a file: the account is named within 20 steps, and its slope; no other is."""  # P30
    async with leaky(kind) as (url, process):
        async with RolloutClient(url) as client:
            record = await client.memory()
            status = await client.status()
            async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as answer:
                metrics = await answer.text()
        [growth] = record["growing"]
        assert growth["account"] == account
        assert growth["bytes_per_step"] == pytest.approx(BYTES, rel=0.4)
        assert abs(growth["since_step"] - REST) <= 3
        assert record["verdict"].startswith(f"growing: {account} of service by ")
        assert status["memory"] == {"verdict": record["verdict"], "growing": record["growing"]}
        assert (record["step"], record["steps"]) == (REST + LEAK - 1, REST + LEAK)
        assert f'rollout_memory_bytes{{account="{account}",process="service"}}' in metrics
        assert f'rollout_memory_growth_bytes_per_step{{account="{account}",process="service"}}' in metrics
        assert f'rollout_memory_growing_total{{account="{account}",process="service"}} 1.0' in metrics
        if kind == "handles":
            assert record["handles"] == {"experts": {"handles": LEAK, "bytes": LEAK * BYTES}}
            assert {one["holder"] for one in record["holders"]} == {"sample s1"}
        [said] = await warnings(process)
        assert (said["account"], said["again"], said["level"]) == (account, False, "warning")


async def test_a_service_that_leaks_nothing_is_flat_and_its_table_can_be_pasted() -> None:
    """Nothing is said of it; `rollout-svc memory` prints the verdict, every account, and what it runs on."""  # P30
    async with leaky("none") as (url, process):
        shown = await asyncio.to_thread(run, "memory", "--url", url)
        record = orjson.loads((await asyncio.to_thread(run, "memory", "--url", url, "--json")).stdout)
        assert shown.returncode == 0
        head, seen, *rest = shown.stdout.splitlines()
        assert head == record["verdict"] == "nothing grows: seen over the last 20 steps"
        assert seen == f"{REST + LEAK} steps seen, the last one {REST + LEAK - 1}; slopes over 20 steps"
        for account in ("rss", "python_heap", "shared_memory", "replay_buffer", "in_flight", "unaccounted"):
            assert any(account in line.split() for line in rest), account
        assert any(line.startswith("rollout_svc ") and "python 3." in line for line in rest)
        assert "\x1b" not in shown.stdout
        assert record["growing"] == []
        assert await warnings(process) == []
