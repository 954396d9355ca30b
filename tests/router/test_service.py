"""The service behind a real sglang-router, in front of two real engines in processes of their own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.embedded.model import build, preset, save_weights
from tests.router.processes import EngineProcess, Router, engine_process, router_process
from tests.support.stage import Stage, stage

PROMPTS = 32
LONG = 900
"""Tokens of an answer that is still being made when something happens; 1,024 is the engine's context."""
DEADLINE_S = 10.0
WAIT_S = 40.0
POLL_S = 0.01


class Site:
    """Two engines, a router, a service."""

    def __init__(self, made: Stage, router: Router, engines: list[EngineProcess]) -> None:
        self.made = made
        self.router = router
        self.engines = engines

    @property
    def worker(self) -> dict[str, Any]:
        """What status says of the router's worker."""
        [worker] = self.made.service.status()["workers"]
        return dict(worker)

    async def counts(self) -> dict[str, int | None]:
        """Each engine's own count, asked by us and not by way of the router."""
        return await self.made.parts.supervisor._control.counts(self.made.worker())

    async def counted(self, holds: Callable[[list[int | None]], bool]) -> None:
        """Wait until the engines' counts are as told."""
        async with asyncio.timeout(WAIT_S):
            while not holds(list((await self.counts()).values())):  # noqa: ASYNC110 - engines are other processes
                await asyncio.sleep(POLL_S)

    async def loaded(self) -> None:
        """Wait until the engines together run all prompts, each of them some."""
        await self.counted(lambda counts: all(counts) and sum(count or 0 for count in counts) == PROMPTS)

    async def until_state(self, state: str) -> None:
        """Wait until the worker is in a state."""
        await self.made.until(lambda: self.worker["state"] == state, state, WAIT_S)

    async def all_samples(self, step: int = 0, groups: int = PROMPTS) -> list[dict[str, Any]]:
        """Take everything; each prompt is there once, whole."""
        batch = await self.made.take(step=step, groups=groups, timeout_s=WAIT_S)
        assert len({group["prompt"]["id"] for group in batch["groups"]}) == groups
        samples = [sample for group in batch["groups"] for sample in group["samples"]]
        assert {sample["status"] for sample in samples} == {"COMPLETED"}
        assert all(len(s["logprobs"]) == len(s["response_ids"]) == s["weight_versions"][-1]["end"] for s in samples)
        return samples


@asynccontextmanager
async def site(tmp_path: Path, *, tokens: int = 8, stream: bool = False) -> AsyncIterator[Site]:
    """Everything, with greedy answers of so many tokens and room for all prompts."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine_process("--max-running", "64")) for _ in range(2)]
        urls = [engine.url for engine in engines]
        flags = ("--policy", "round_robin", "--disable-retries")
        router = await stack.enter_async_context(router_process(urls, tmp_path / "router.log", *flags))
        worker = {"url": router.url, "engines": urls, "max_batch": PROMPTS, "stream": stream}
        sampling = {"max_tokens": tokens, "temperature": 0.0, "extra": {"ignore_eos": True}}
        trainer = {"train_batch_size": PROMPTS}
        made = await stack.enter_async_context(stage(worker, sampling=sampling, trainer=trainer))
        yield Site(made, router, engines)


def save(folder: Path, seed: int) -> str:
    """Write other weights for the engines."""
    save_weights(build(preset("tiny"), seed), folder / "model.safetensors")
    return str(folder)


@pytest.mark.timeout(120)
async def test_register_and_generate(tmp_path: Path) -> None:
    """Both engines are recognised behind the router, and a batch comes through it."""
    async with site(tmp_path) as at:
        assert at.worker["state"] == "ACTIVE"
        assert at.worker["dialect"] == "sglang"
        assert at.worker["engines"] == [engine.url for engine in at.engines]
        assert "experts" not in at.worker["capabilities"]
        assert at.worker["limit"] >= 2 * PROMPTS
        await at.made.push(PROMPTS)
        samples = await at.all_samples()
        assert {len(sample["response_ids"]) for sample in samples} == {8}
        assert {span["version"] for sample in samples for span in sample["weight_versions"]} == {0}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_pause_under_load(tmp_path: Path, stream: bool) -> None:
    """P8 P9 P10: in time, clean, every engine idle by its own count, and every token made goes on."""
    async with site(tmp_path, tokens=LONG, stream=stream) as at:
        await at.made.push(PROMPTS)
        await at.loaded()
        report = await at.made.pause(DEADLINE_S)
        tally = report.as_json()["workers"]["w0"]
        assert report.clean
        assert (tally["in_flight"], tally["residual"]) == (PROMPTS, 0)
        assert set((await at.counts()).values()) == {0}
        kept = {s.sample_id: list(s.response_ids) for group in at.made.live_groups() for s in group.samples}
        assert len(kept) == PROMPTS
        assert all(len(ids) < LONG for ids in kept.values())
        assert any(kept.values())  # of those that still waited in an engine's queue there is nothing to keep
        await at.made.resume()
        for sample in await at.all_samples():
            ids = kept[sample["sample_id"]]
            assert sample["response_ids"][: len(ids)] == ids
            assert len(sample["response_ids"]) == LONG


@pytest.mark.timeout(120)
async def test_weights_from_disk_reach_both(tmp_path: Path) -> None:
    """P7 P24: both engines say so themselves, and both answer differently from before, and alike."""
    async with site(tmp_path) as at:
        await at.made.push([{"id": f"p{n}", "input_ids": [1, 2, 3]} for n in range(PROMPTS)])
        before = {tuple(sample["response_ids"]) for sample in await at.all_samples()}
        await at.made.pause(DEADLINE_S)
        answer = await at.made.service.update_weights(1, {"kind": "disk", "path": save(tmp_path, 7)})
        assert answer == {"version": 1, "workers": {"w0": {"ok": True, "version": 1}}}
        await at.made.resume(weight_version=1)
        await at.made.push([{"id": f"q{n}", "input_ids": [1, 2, 3]} for n in range(PROMPTS)])
        samples = await at.all_samples(step=1)
        after = {tuple(sample["response_ids"]) for sample in samples}
        assert {span["version"] for sample in samples for span in sample["weight_versions"]} == {1}
        assert len(before) == len(after) == 1
        assert before != after


@pytest.mark.timeout(180)
async def test_one_engine_is_killed(tmp_path: Path) -> None:
    """P2 P9 P19: named at once, nothing lost, counted honestly; it returns with the weights, and so does traffic."""
    async with site(tmp_path, tokens=LONG) as at:
        gone, left = at.engines
        await at.made.push(PROMPTS)
        await at.loaded()
        struck = time.monotonic()
        await gone.kill()
        await at.until_state("RECOVERING")
        noticed_s = time.monotonic() - struck
        assert gone.url in at.worker["reason"]
        assert left.url not in at.worker["reason"]
        counts = await at.counts()
        assert counts[gone.url] is None
        assert counts[left.url] == PROMPTS // 2
        await at.made.take(groups=PROMPTS // 2, timeout_s=WAIT_S)  # what the other ran was answered, and counts
        report = await at.made.pause(DEADLINE_S)
        tally = report.as_json()["workers"]["w0"]
        assert (tally["residual"], tally["uncounted"]) == (None, [gone.url])
        await at.made.resume()
        assert at.made.service.status()["ledger"]["groups"]["failed"] == 0
        started = time.monotonic()
        await gone.start()
        up = time.monotonic()
        await at.until_state("ACTIVE")
        back_s = time.monotonic() - up
        rest = await at.all_samples(step=1, groups=PROMPTS // 2)
        assert {len(sample["response_ids"]) for sample in rest} == {LONG}
        assert {span["version"] for sample in rest for span in sample["weight_versions"]} == {0}
        _tell(
            f"noticed after {noticed_s:.3f} s; back {back_s:.3f} s after its port answered; start {up - started:.1f} s"
        )


@pytest.mark.timeout(180)
async def test_an_engine_restarted_under_old_weights(tmp_path: Path) -> None:
    """P19 P24: it comes back with the weights of its start, and is given the current ones before any request."""
    async with site(tmp_path) as at:
        gone, _ = at.engines
        await at.made.pause(DEADLINE_S)
        await at.made.service.update_weights(1, {"kind": "disk", "path": save(tmp_path, 7)})
        await at.made.resume()
        await gone.kill()
        await at.until_state("RECOVERING")
        await gone.start()
        await at.until_state("ACTIVE")
        assert at.worker["weight_version"] == 1
        await at.made.push([{"id": f"p{n}", "input_ids": [1, 2, 3]} for n in range(PROMPTS)])
        samples = await at.all_samples(step=1)
        assert {span["version"] for sample in samples for span in sample["weight_versions"]} == {1}
        assert len({tuple(sample["response_ids"]) for sample in samples}) == 1


@pytest.mark.timeout(120)
async def test_the_router_is_killed(tmp_path: Path) -> None:
    """Its requests end at the engines as well, and the worker is out until somebody answers at its address."""
    async with site(tmp_path, tokens=LONG) as at:
        await at.made.push(PROMPTS)
        await at.loaded()
        await at.router.kill()
        await at.made.until(lambda: at.worker["state"] != "ACTIVE", "out of traffic", WAIT_S)
        await at.counted(lambda counts: counts == [0, 0])
        assert at.made.service.status()["ledger"]["groups"]["failed"] == 0


def _tell(line: str) -> None:
    """What was measured, for `make test-router` to show."""
    os.write(2, f"\n  {line}\n".encode())
