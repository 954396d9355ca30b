"""A fake engine for services on the cluster: in this process, in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout_svc.rpc.background import BackgroundLoop
from tests.support.fake_sglang import FakeSGLang, Reply

__all__ = ["fake_engine"]


@contextmanager
def fake_engine(**settings: Any) -> Iterator[FakeSGLang]:
    """Serve an engine that answers every generation at once."""
    background = BackgroundLoop()

    async def enter() -> FakeSGLang:
        engine = FakeSGLang(weight_version="0", **settings)
        engine.answer = lambda _: Reply()
        return await engine.__aenter__()

    async def leave() -> None:
        await engine.__aexit__(None, None, None)

    engine = background.run(enter())
    try:
        yield engine
    finally:
        background.close(leave)
