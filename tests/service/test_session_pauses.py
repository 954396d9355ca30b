"""Sessions and the ways to stop: an agent sees turns, never a pause, never an update of weights."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from rollout_svc.service import RolloutService
from tests.support.fake_sglang import FakeSGLang
from tests.support.session_site import Client, Site, ids, session_site

HI = {"role": "user", "content": "hi"}
TURNS = 4


def versions(sample: dict[str, Any]) -> list[tuple[int, int, int]]:
    """The weight versions of a sample's tokens."""
    return [(span["version"], span["start"], span["end"]) for span in sample["weight_versions"]]


async def update(service: RolloutService, version: int) -> None:
    """Give the paused fleet other weights."""
    told = await service.update_weights(version, {"kind": "disk", "path": f"v{version}"})
    assert told["workers"]["w0"]["ok"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_turn_that_a_pause_cuts_is_answered_whole_over_two_versions(mode: str, *, stream: bool) -> None:
    """P7 P15: the client saw one turn; its tokens have two weight versions, and the agent was parked or frozen."""
    async with session_site() as site:
        made, engine = site.stage, site.engine
        client = await site.taken()
        going = made.start(client.chat(HI, stream=stream))
        await engine.wait_running(1)
        engine.advance(engine.calls("running")[0], 2)
        report = await made.pause(2.0, mode=mode)
        assert report.clean
        assert len(report.parked) == (mode == "abort")
        await update(made.service, 1)
        assert not going.done()
        await made.resume(weight_version=1)
        await engine.until(lambda: engine.paused is None and engine.running == 1, "going on")
        engine.release(tokens=ids("yo" if mode == "abort" else "efyo"))
        status, answer = await going
        assert status == 200
        assert "efyo" in str(answer)
        await client.end()
        [group] = (await made.take(step=1))["groups"]
        [sample] = group["samples"]
        assert sample["response_ids"] == ids("efyo")
        assert versions(sample) == [(0, 0, 2), (1, 2, 4)]
        assert site.figures["turns"] == 1


async def test_a_client_that_leaves_during_a_pause_leaves_nothing() -> None:
    """P10 P15: its cut turn is not gone on with after the pause; asked again, it is made again."""
    async with session_site() as site:
        client = await site.taken()
        going = site.stage.start(client.chat(HI))
        await site.engine.wait_running(1)
        await site.stage.pause()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        await site.until(cancelled_turns=1)
        await site.stage.resume()
        assert not site.engine.live
        again = site.stage.start(client.say("hi"))
        await site.engine.wait_running(1)
        site.engine.release(tokens=ids("yo"))
        assert await again == "yo"
        await client.end()
        [group] = (await site.stage.take())["groups"]
        assert group["samples"][0]["response_ids"] == ids("yo")


async def test_an_end_and_a_reward_are_taken_during_a_pause() -> None:
    """P13: no engine is needed for them; the sample is judged after the pause."""
    async with session_site() as site:
        client = await site.taken()
        going = site.stage.start(client.say("hi"))
        await site.engine.wait_running(1)
        site.engine.release(tokens=ids("yo"))
        await going
        await site.stage.pause()
        assert (await client.post(f"/sessions/{client.session_id}/reward", {"reward": 1.0}))[0] == 200
        assert (await client.end())[0] == 200
        await site.stage.resume()
        assert len((await site.stage.take())["groups"]) == 1


async def test_stopping_ends_every_session() -> None:
    """P8: turns at the engine, turns at the gate and agents that think: the service stops, and nothing is left."""
    async with session_site(3) as site:
        thinking, at_engine, at_gate = [await site.taken() for _ in range(3)]
        assert thinking.session_id
        calls = [site.stage.start(at_engine.chat(HI))]
        await site.engine.wait_running(1)
        await site.stage.pause()
        calls.append(site.stage.start(at_gate.chat(HI)))
        await site.until(turns_under_way=2)
        await site.stage.service.stop()
        assert [status for status, _ in await asyncio.gather(*calls)] == [410, 410]


async def converse(client: Client, name: int) -> None:
    """Have some turns, then end."""
    for turn in range(TURNS):
        await client.say(f"m{turn} of {name}")
    await client.end()


async def work(engine: FakeSGLang, rng: Random) -> None:
    """Be an engine that answers what runs, after a while."""
    while True:
        await engine.until(lambda: engine.paused is None and bool(engine.calls("running")), "work", timeout_s=None)
        for _ in range(rng.randrange(40)):
            await asyncio.sleep(0)
        if engine.paused is None and (calls := engine.calls("running")):
            engine.release(rng.choice(calls), tokens=ids("yo"))


async def stop_and_go(site: Site, rng: Random, talking: asyncio.Future[Any]) -> None:
    """Pause at any moment, in any mode, with other weights now and then."""
    version = 0
    while not talking.done():
        for _ in range(rng.randrange(60)):
            await asyncio.sleep(0)
        report = await site.stage.pause(5.0, mode=rng.choice(["abort", "keep"]))
        assert report.clean
        if rng.random() < 0.5:
            version += 1
            await update(site.stage.service, version)
        await site.stage.resume()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_whatever_the_pauses_an_agent_sees_whole_turns_and_they_are_what_is_trained_on(seed: int) -> None:
    """P6 P7 P15: a pause at any moment of eight sessions, updates in between."""
    rng = Random(seed)
    async with session_site(8, trainer={"train_batch_size": 8, "max_staleness": 1000}) as site:
        site.engine.tokens_so_far = 1
        clients = [await site.taken() for _ in range(8)]
        working = site.stage.start(work(site.engine, rng))
        talking = asyncio.gather(*(converse(client, name) for name, client in enumerate(clients)))
        await stop_and_go(site, rng, talking)
        await talking
        groups = (await site.stage.take(groups=8))["groups"]
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        told = {"".join(f"<{m['role'][0]}>{m['content']};" for m in c.history).removesuffix(";") for c in clients}
        [samples] = zip(*(group["samples"] for group in groups), strict=True)
        assert {bytes(sample["prompt_ids"] + sample["response_ids"]).decode() for sample in samples} == told
        for sample in samples:
            assert "earlier_segments" not in sample
            spans = versions(sample)
            assert sum(end - start for _, start, end in spans) == sum(sample["loss_mask"])
        assert any("eyo" in words for words in told)  # some were cut
        assert len({version for sample in samples for version, _, _ in versions(sample)}) > 1
        assert site.figures["turns"] == 8 * TURNS
