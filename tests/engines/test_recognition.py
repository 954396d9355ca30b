"""Each dialect knows its own engine, and takes no other for it."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from rollout_svc.engines import DIALECTS, Endpoint, HttpTransport, candidates
from rollout_svc.errors import WorkerFailure
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.control import Control
from rollout_svc.workers.worker import Worker
from tests.support.face import Face
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM

FAKES: dict[str, type[Face]] = {"sglang": FakeSGLang, "vllm": FakeVLLM, "lmdeploy": FakeLMDeploy}


def worker_at(engine: Face, dialect: str, key: str | None = None) -> Worker:
    """Make a worker of an engine that may speak that."""
    return Worker(
        worker_id="w0",
        endpoint=Endpoint(engine.url, key, None),
        candidates=candidates(dialect),
        max_batch=None,
        exclusive=True,
        stream=False,
        breaker=Breaker(Random(0)),
        on_change=lambda *_: None,
    )


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("name", FAKES)
async def test_auto_finds_the_engine(name: str, key: str | None) -> None:
    """Asked in turn, the one whose engine it is says so, with and without a key."""
    async with FAKES[name](api_key=key) as engine, HttpTransport() as transport:  # type: ignore[call-arg]
        worker = worker_at(engine, "auto", key)
        profile = await Control(transport).probe(worker)
        assert (profile.dialect, worker.dialect.name) == (name, name)


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_nobody_takes_another(dialect: str, name: str) -> None:
    """Configured as another engine, it is refused in one line that says what it answered."""  # P35
    async with FAKES[name]() as engine, HttpTransport() as transport:
        worker = worker_at(engine, dialect)
        if dialect == name:
            await Control(transport).probe(worker)
            return
        with pytest.raises(WorkerFailure) as caught:
            await Control(transport).probe(worker)
        assert caught.value.kind == "wrong_dialect"
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "off", [{"docs": False}, {"metrics": False}, {"pytorch": False}, {"docs": False, "metrics": False}]
)
async def test_lmdeploy_with_less(off: dict[str, Any]) -> None:
    """Without its documents, metrics or first backend it is LMDeploy all the same."""
    async with FakeLMDeploy(**off) as engine, HttpTransport() as transport:
        assert (await Control(transport).probe(worker_at(engine, "auto"))).dialect == "lmdeploy"


@pytest.mark.parametrize("name", FAKES)
async def test_a_wrong_key_is_a_wrong_key(name: str) -> None:
    """Nobody calls an engine that refuses the key another engine."""  # P35
    async with FAKES[name](api_key="k") as engine, HttpTransport() as transport:  # type: ignore[call-arg]
        with pytest.raises(WorkerFailure) as caught:
            await Control(transport).probe(worker_at(engine, name, "other"))
        assert caught.value.kind == "unauthorized"
