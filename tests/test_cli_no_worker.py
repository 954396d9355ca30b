"""`serve` without a worker left: it ends with 1 when it was told to, and its last words say who is where."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_sglang import FakeSGLang
from tests.test_cli import served


async def test_a_service_that_lost_its_last_worker_exits_1(tmp_path: Path) -> None:
    """After `producer.no_worker_timeout_s` the log names the workers and the reasons, and the exit code is 1."""  # P23
    producer = {"no_worker_timeout_s": 0.3}
    async with (
        FakeSGLang(weight_version="0") as engine,
        served(tmp_path, workers=[{"url": engine.url}], producer=producer) as service,
    ):
        service.url = await service.word("service.ready")
        await engine.kill()
        told = await service.logged("component.died")
        assert told["component"] == "workers"
        assert "no worker was in traffic for producer.no_worker_timeout_s = 0.3 s (w0 " in told["error"]
        code, _ = await service.ended()
        assert code == 1
