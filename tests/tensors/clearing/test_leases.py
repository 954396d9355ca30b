"""P29: shards whose ids were lost go with their leases, and those of a live batch stay, in virtual time."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from structlog.testing import capture_logs

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.clearing import Controller
from rollout_svc.tensors.rtensor import RTensor, localize, remotize
from rollout_svc.tensors.shards import Fetcher, Plane, ShardOwner
from tests.support.peers import DirectPeer
from tests.support.virtual import virtual

LEASE_S = 100.0
HERE = "direct:owner"


@dataclass
class Site:
    """An owner on virtual time, and a controller that reaches it."""

    owner: ShardOwner = field(default_factory=lambda: ShardOwner(HERE, lease_s=LEASE_S, clock=_now))

    def controller(self) -> Controller:
        return Controller(Plane(), connect=lambda _: DirectPeer(Plane(self.owner)), renew_s=LEASE_S / 4)

    def make(self) -> RTensor:
        made = remotize(np.zeros(256, dtype=np.float32), self.owner)
        assert isinstance(made, RTensor)
        return made


def _now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def site() -> Iterator[Site]:
    """Nothing is left of what the owner held."""
    built = Site()
    yield built
    assert built.owner.handles.live == {}


@virtual
async def test_a_shard_whose_id_was_lost_goes_away(site: Site) -> None:
    """P29: its receiver crashed, so nobody clears it; its lease ends, and the next clear says so."""
    lost, known = site.make(), site.make()
    controller = site.controller()
    await asyncio.sleep(LEASE_S / 2)
    with capture_logs() as logs:
        await controller.clear_batches(known)
        assert site.owner.stats().entries == 1
        await asyncio.sleep(LEASE_S / 2 + 1)
        cleared = await controller.clear_batches(site.make())
    assert (cleared.entries, cleared.expired) == (0, ((HERE, 1),))
    (warning,) = [log for log in logs if log["log_level"] == "warning"]
    assert (warning["event"], warning["process"], warning["shards"]) == ("shards.expired", HERE, 1)
    with pytest.raises(ShardFailure, match="missing"):
        localize(lost, Fetcher(local=site.owner))
    await controller.close()


@virtual
async def test_a_shard_that_nobody_claims_is_a_leak_at_the_second_look(site: Site) -> None:
    """P29: at the first one it may be of a batch that is being made; its lease is not waited for."""
    site.make()
    controller = site.controller()
    assert (await controller.clear_batches(site.make())).leaks == ()
    (leak,) = (await controller.clear_batches(site.make())).leaks
    assert (leak.where, leak.entries, leak.parts) == ("owner", 1, ("owner",))
    site.owner.close()
    await controller.close()


@virtual
async def test_a_live_batch_outlasts_its_lease(site: Site) -> None:
    """P29: it is renewed in time until it is cleared, however long its step takes."""
    batch = site.make()
    controller = site.controller()
    async with controller.step(batch) as step:
        await asyncio.sleep(5 * LEASE_S)
        assert localize(batch, Fetcher(local=site.owner)).shape == (256,)
    assert step.cleared is not None
    assert (step.cleared.entries, step.cleared.expired) == (0, ())
    await controller.close()


@virtual
async def test_a_batch_that_is_not_named_live_does_not(site: Site) -> None:
    """P29: the test above is of the renewals, and of nothing else."""
    site.make()
    await asyncio.sleep(LEASE_S + 1)
    assert site.owner.stats().expired == 1
