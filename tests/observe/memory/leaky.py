"""A service in a process of its own that takes steps and leaks: `python -m tests.observe.memory.leaky KIND`.

It prints its address once all steps were taken, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from typing import Any, Final

import numpy as np

from rollout_svc.events import EventBus, MemorySampled
from rollout_svc.observe.log_events import log_events
from rollout_svc.observe.logs import configure_logs
from rollout_svc.observe.metrics import Metrics
from rollout_svc.rpc.server import serve_http
from rollout_svc.service import RolloutService
from rollout_svc.tensors import MemoryStore
from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.stage import TASK, lines, make_config

REST: Final = 25
"""Steps before the leak."""
LEAK: Final = 20
"""Steps of the leak: it is to be named by the last one."""
BYTES: Final = 4_000_000
"""A step."""


class Leaks:
    """One way to leak each; the objects live as long as this."""

    def __init__(self, service: RolloutService) -> None:
        self.service = service
        self.kept: list[Any] = []
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it is a leak

    def none(self) -> None:
        """Leak nothing."""

    def handles(self) -> None:
        """Tensors that nobody releases."""
        stored = MemoryStore().put(np.ones(BYTES, dtype=np.uint8))
        self.kept.append(self.service.parts.handles.hold(stored, kind="experts", holder="sample s1"))

    def heap(self) -> None:
        """A plain list of small objects."""
        self.kept.extend(f"{len(self.kept)}-{number}" for number in range(BYTES // 64))

    def disk(self) -> None:
        """A file that nobody cuts."""
        self.file.write(bytes(BYTES))


async def main(kind: str) -> None:
    """Take the steps, then serve."""
    bus = EventBus()
    log_events(bus, "warning")
    sampled = asyncio.Event()
    bus.subscribe(MemorySampled, lambda event: sampled.set() if event.step is not None else None)
    async with FakeSGLang(weight_version="0") as engine:
        engine.answer = _answer
        trainer = {"train_batch_size": 1, "max_staleness": 1000}
        config = make_config(engine, trainer=trainer, memory={"debug": True})
        service = RolloutService(config, bus=bus)
        metrics = Metrics(bus, service.status)
        async with serve_http(service, metrics.render) as url:
            await service.start()
            await service.ready()
            await service.put_prompts(TASK, lines(REST + LEAK + 10))
            leak = getattr(Leaks(service), kind)
            for step in range(REST + LEAK):
                if step >= REST:
                    leak()
                sampled.clear()
                batch = await service.take_batch(step, 1, 20.0)
                await service.ack(batch["batch_id"])
                await sampled.wait()
            sys.stdout.write(url + "\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.read)
            await service.stop()


def _answer(call: Call) -> Reply:
    return Reply(tokens=[5, 6, call.prompt_ids[-1]])


if __name__ == "__main__":
    configure_logs("warning", json=True)
    asyncio.run(main(sys.argv[1]))
