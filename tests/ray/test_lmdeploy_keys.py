"""Keys of routed experts: fetched once from where LMDeploy's Ray executor keeps them, or named as missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Endpoint, GenerateRequest, LMDeployDialect, lmdeploy_keys
from rollout_svc.engines.lmdeploy_keys import ExpertKeys
from rollout_svc.errors import SampleFailure
from rollout_svc.tensors.experts import RawExperts, decode
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.lifted import LiftingTransport
from tests.support.routing import TINY
from tests.support.sglang_wire import Reply

NOWHERE = "ab" * 28


class Kept:
    """What the engine keeps, as a test sees it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def put(self, array: Any) -> str:
        """Keep an array; returns its key."""
        import ray

        key: str = ray.get(self.actor.put.remote(array))
        return key

    @property
    def count(self) -> int:
        """How many are kept."""
        import ray

        count: int = ray.get(self.actor.count.remote())
        return count


@pytest.fixture(scope="module")
def kept(ray_cluster: str) -> Iterator[Kept]:
    """The actor, as LMDeploy starts it."""
    import ray

    class Shared:
        """Keeps arrays by the id of their object, for one fetch each."""

        def __init__(self) -> None:
            self.references: dict[str, Any] = {}

        def put(self, array: Any) -> str:
            reference = ray.put(array)
            self.references[reference.hex()] = reference
            return str(reference.hex())

        def get(self, key: str) -> Any:
            return ray.get(self.references.pop(key))

        def count(self) -> int:
            return len(self.references)

    remote = ray.remote(num_cpus=0)(Shared)
    actor: Any = remote.options(name="shared_store", namespace="lmdeploy", lifetime="detached").remote()
    yield Kept(actor)
    ray.kill(actor)


async def test_a_key_is_good_for_one_fetch(kept: Kept) -> None:
    """What is fetched is there no more; whoever comes second is told so."""
    keys = ExpertKeys()
    rows = TINY.hidden([3, 1, 4, 1, 5]).astype(np.uint16)
    key = kept.put(rows)
    assert kept.count == 1
    np.testing.assert_array_equal(await keys.fetch(key), rows)
    assert kept.count == 0
    with pytest.raises(SampleFailure, match=r"experts_missing.*KeyError"):
        await keys.fetch(key)


async def test_a_key_that_was_never_there_is_missing(kept: Kept) -> None:
    """A failure of the sample, in one line."""
    with pytest.raises(
        SampleFailure, match=r"experts_missing.*abababababababab… at LMDeploy's shared_store"
    ) as failure:
        await ExpertKeys().fetch(NOWHERE)
    assert "\n" not in str(failure.value)
    assert kept.count == 0


async def test_without_the_actor_a_key_is_missing(ray_cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on another cluster, or none with the Ray executor."""
    monkeypatch.setattr(lmdeploy_keys, "_ACTOR", "nobody")
    with pytest.raises(SampleFailure, match="experts_missing"):
        await ExpertKeys(ray_cluster).fetch(NOWHERE)


async def test_whoever_leaves_leaves_nothing_behind(kept: Kept) -> None:
    """P27: an answer that came too late is fetched to the end all the same, and dropped."""
    keys = ExpertKeys()
    key = kept.put(TINY.hidden([3, 1, 4]).astype(np.uint16))
    fetching = asyncio.ensure_future(keys.fetch(key))
    await asyncio.sleep(0)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    async with asyncio.timeout(20):
        while kept.count:  # noqa: ASYNC110 - another process rings no bell here
            await asyncio.sleep(0.01)


async def test_a_key_may_take_no_longer_than_it_may(kept: Kept) -> None:
    """Bounded, whatever becomes of the cluster."""
    with pytest.raises(SampleFailure, match=r"experts_missing.*(not within 0 s|timed out)"):
        await ExpertKeys(timeout_s=0.0).fetch(NOWHERE)


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
async def test_from_an_answer_to_rows(kept: Kept, finish: Any) -> None:
    """The whole way: the answer has a key, the key an array, the array the rows of the answer's tokens."""
    prompt, dialect = [3, 1, 4, 1, 5], LMDeployDialect()
    request = GenerateRequest(f"{1:032x}", list(prompt), 8, SamplingConfig(), experts_from=2)
    async with FakeLMDeploy(experts=TINY) as engine, LiftingTransport() as transport:
        engine.share_experts = lambda array: kept.put(np.asarray(array, dtype=np.uint16))
        engine.answer = lambda _: Reply(tokens=4, finish=finish)
        reply = await transport.data(Endpoint(engine.url, None, None), dialect.generate(request))
    completion, raw = dialect.parse_generate(reply), dialect.experts_of(reply.lifted, request)
    assert raw is not None
    assert raw.form == "key"
    rows = decode(
        RawExperts("array", await ExpertKeys().fetch(raw.data)),
        TINY.layout,
        tokens=len(prompt) + len(completion.ids),
        held=2,
        stopped=finish == "stop",
    )
    assert rows.tolist() == TINY.rows([*prompt, *completion.ids])[2:].tolist()
    assert kept.count == 0
