"""Routed experts over HTTP: in a batch of tensors, and one sample at a time for who takes batches as JSON."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest

from rollout_svc.errors import Conflict, NotFound
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.reading import experts_of, read_batch, read_experts
from rollout_svc.rpc.blocking import SyncRolloutClient
from rollout_svc.rpc.client import RolloutClient
from tests.chaos.turns import TurnMeter
from tests.rpc.api import TOKEN, Caller, api
from tests.rpc.test_tensors import FETCH, STALL_S
from tests.support.groups import make_prompt
from tests.support.routed import ready_group, routing
from tests.support.stage import Stage

ROWS = 16 * 2**20 // (64 * 8)
"""Of 64 layers with 8 experts: 16 MiB."""


def fill(made: Stage, *group_ids: str, **how: Any) -> None:
    """Put groups into the buffer as if they had been generated with routed experts."""
    for number, group_id in enumerate(group_ids):
        prompt = make_prompt(prompt_id=f"p{number}")
        group = ready_group(made.parts.ledger, made.parts.handles, group_id, prompt=prompt, **how)
        made.parts.buffer.put_ready(group)


@pytest.fixture
async def call() -> AsyncIterator[Caller]:
    """Yield an API with a group of two samples with experts, and one of two without."""
    async with api(ready=False) as caller:
        fill(caller.stage, "a")
        fill(caller.stage, "b", routed=False)
        yield caller


def check(found: dict[str, Any]) -> None:
    """It is what group `a` has, and nothing of `b`."""
    assert found.keys() == {"a.0", "a.1"}
    for name, rows in (("a.0", 6), ("a.1", 7)):
        assert np.array_equal(found[name], routing(name, rows))


async def test_the_clients_get_them_in_either_form(call: Caller) -> None:
    """From a batch of JSON by a call per sample, from one of tensors without any; blocking as well."""
    async with RolloutClient(call.url) as client:
        record = await client.take_batch(0, 2, ack=None)
        assert "experts" not in orjson.dumps(record).decode()
        check(await client.take_experts(record))
        check(await client.take_experts(await client.take_batch(0, 2, ack=None, tensors=True)))
    with SyncRolloutClient(call.url) as blocking:
        check(await asyncio.to_thread(blocking.take_experts, record))


async def test_what_is_not_lent_is_not_there(call: Caller) -> None:
    """Before the take, after the ack, without experts, unknown: 404, by type; for a client the first is an error."""
    assert (await call.refused("GET", "/v1/tensors/a.0"))[:2] == (404, "not_found")
    async with RolloutClient(call.url) as client:
        record = await client.take_batch(0, 2, ack=None)
        assert (await call.refused("GET", "/v1/tensors/b.0"))[:2] == (404, "no_experts")
        assert (await call.refused("GET", "/v1/tensors/nobody"))[:2] == (404, "not_found")
        async with call.session.get(call.url + "/v1/tensors/a.1") as answer:
            assert (answer.status, answer.content_type) == (200, MEDIA_TYPE)
            assert np.array_equal(read_experts(await answer.read()), routing("a.1", 7))
        await client.ack(record["batch_id"])
        assert (await call.refused("GET", "/v1/tensors/a.0"))[:2] == (404, "not_found")
        with pytest.raises(NotFound, match="no batch that is lent"):
            await client.take_experts(record)


async def test_they_want_the_token() -> None:
    """Where there is one."""  # P34
    async with api(ready=False, service={"port": 0, "token": TOKEN}) as call:
        fill(call.stage, "a")
        await call.stage.service.lease_batch(0, 1, 5.0)
        assert (await call.refused("GET", "/v1/tensors/a.0"))[:2] == (401, "unauthorized")
        async with RolloutClient(call.url, TOKEN) as client:
            assert len(await client.take_experts(await client.take_batch(0, 1))) == 2


async def test_experts_of_two_models_are_refused_as_one_tensor() -> None:
    """The batch stays lent, and can be taken as JSON."""
    async with api(ready=False) as call, RolloutClient(call.url) as client:
        fill(call.stage, "a")
        fill(call.stage, "b", layers=4)
        with pytest.raises(Conflict) as refused:
            await client.take_batch(0, 2, tensors=True)
        assert refused.value.type == "experts_differ"
        found = await client.take_experts(await client.take_batch(0, 2))
        assert [experts.shape[1] for experts in found.values()] == [3, 3, 4, 4]


async def test_an_ack_while_it_streams_breaks_nothing() -> None:
    """The rest of the body comes, though nobody owns the experts any more; they are gone with it."""  # P27
    async with api(ready=False) as call:
        fill(call.stage, "a", size=1, tokens=2**16, layers=16)
        async with aiohttp.ClientSession(read_bufsize=1024) as session:
            sent = {"step": 0, "groups": 1}
            async with session.post(call.url + "/v1/batches", json=sent, headers={"Accept": MEDIA_TYPE}) as answer:
                begun = await answer.content.read(10)
                await call.stage.service.ack(call.stage.parts.buffer.leases[0].batch_id)
                assert call.stage.parts.handles.live == {}
                body = begun + await answer.content.read()
        assert np.array_equal(experts_of(read_batch(body))["a.0"], routing("a.0", 2 + 2**16, layers=16))


async def test_an_ack_before_it_streams_is_told(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was consumed while it was packed is refused as a lease that is over, not sent in part."""
    service = call.stage.service
    lease_batch = service.lease_batch

    async def leased_and_lost(*arguments: Any) -> Any:
        batch = await lease_batch(*arguments)
        for group in batch.groups:
            for sample in group.samples:
                if sample.experts is not None:
                    sample.experts.release("a test")
        return batch

    monkeypatch.setattr(service, "lease_batch", leased_and_lost)
    body = orjson.dumps({"step": 0, "groups": 2})
    async with call.session.post(call.url + "/v1/batches", data=body, headers={"Accept": MEDIA_TYPE}) as answer:
        assert answer.status == 409
        assert (await answer.json())["error"]["type"] == "lease_expired"


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/tensors/a.0"])
async def test_large_experts_do_not_hold_the_loop(path: str) -> None:
    """Four samples of 16 MiB: no turn is longer than 20 ms, in the quietest of five."""
    async with api(ready=False) as call:
        fill(call.stage, "a", size=4, tokens=ROWS - 2, layers=64, top_k=8)
        await call.stage.service.lease_batch(0, 1, 5.0)
        meter = TurnMeter(asyncio.get_running_loop())
        longest = []
        code = [FETCH, call.url, MEDIA_TYPE, '{"step": 0, "groups": 1}']
        if path != "/v1/batches":
            code = [
                FETCH.replace("/v1/batches", path).replace("sys.argv[3].encode()", "None"),
                *code[1:],
            ]
        for _ in range(5):
            fetching = await asyncio.create_subprocess_exec(sys.executable, "-c", *code, stdout=asyncio.subprocess.PIPE)
            meter.reset()  # starting a process is a long turn of its own
            told, _ = await fetching.communicate()
            assert int(told) > (64 if path == "/v1/batches" else 15) * 2**20
            longest.append(meter.longest_s)
            if longest[-1] < STALL_S:
                break
        assert min(longest) < STALL_S, longest
