"""How long a stop may last: whoever ends an actor by force does it after that, and not before."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping
from rollout_svc.ray.lasting import stop_s
from rollout_svc.ray.shard import RayShard
from rollout_svc.sharding.book import CLOSE_S
from rollout_svc.shutdown import STOP_MARGIN_S
from tests.cluster.configs import engine, service
from tests.support.virtual import virtual


class Mute:
    """An actor that never answers, and a Ray that ends it."""

    def __init__(self) -> None:
        self.stop = self
        self.killed_at: float | None = None

    def remote(self) -> Mute:
        """Make the call."""
        return self

    def future(self) -> Future[None]:
        """What it comes to: nothing."""
        return Future()

    def kill(self, _: object, *, no_restart: bool) -> None:
        """End it for good."""
        assert no_restart
        self.killed_at = asyncio.get_running_loop().time()


def config_of(deadline_s: float, shards: int = 1) -> Config:
    """Make settings."""
    sections: dict[str, Any] = {"pause": {"deadline_s": deadline_s}, "producer": {"shards": shards}}
    return config_from_mapping(service(engine(), engine(), cluster="ray", buffer={"path": "journal"}, **sections))


@given(deadline_s=st.floats(0.5, 300.0))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_stop_of_shards_lasts_as_long_as_its_slowest_shard_may(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float
) -> None:
    """P8: it has a pause and the wake of its engines before it is ended by force; so has who coordinates."""
    actor = Mute()
    fake: Any = ModuleType("ray")
    fake.kill = actor.kill
    monkeypatch.setitem(sys.modules, "ray", fake)

    @virtual
    async def stopped() -> float:
        began = asyncio.get_running_loop().time()
        await RayShard("s0", actor, config_of(deadline_s)).stop()
        assert actor.killed_at is not None
        return actor.killed_at - began

    lasted_s = stopped()
    assert lasted_s >= stop_s(config_of(deadline_s)) >= 2 * deadline_s + 2 * STOP_MARGIN_S
    assert stop_s(config_of(deadline_s, 2)) >= deadline_s + STOP_MARGIN_S + lasted_s + CLOSE_S
