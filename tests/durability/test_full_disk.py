"""A disk that fills up under a loaded service: it fails loudly, and what it had answered is there afterwards."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from random import Random

import pytest

from bench.process import Child
from rollout_svc.errors import NotNow, ServiceError, Unreachable
from tests.durability.books import Books
from tests.durability.site import GROUP_SIZE, Dataset, Site
from tests.durability.trainer import Trainer

WAIT_S = 30.0


@pytest.mark.timeout(120)
async def test_a_full_disk_ends_the_service_and_loses_nothing(tmp_path: Path) -> None:
    """When the journal cannot grow the process ends with 1 and says why; the next life has all that was answered."""
    dataset = Dataset(10, 2, seed=1)
    with Child("tests.durability.engine") as engine:
        site = Site(tmp_path, [int(port) for port in engine.ready_line], dataset, 600.0)
        trainer = Trainer(Books(dataset.answers, dataset.passes, GROUP_SIZE, 600.0), Random(1), 40)
        try:
            await site.start()
            await trainer.meet(site.url)
            await trainer.work(time.time() + 0.5)
            log = site.journal.with_name("journal.db-wal")
            resource.prlimit(site.pid, resource.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY))
            with pytest.raises((ServiceError, Unreachable)) as refused:
                await trainer.work(time.time() + WAIT_S)
            assert not isinstance(refused.value, NotNow) or refused.value.type in ("failed", "stopping")
            assert await site.ended(WAIT_S) == 1
            assert "the journal cannot be written" in site.tail()
            await site.start()
            await trainer.meet(site.url)
            await trainer.settle()
            await trainer.finish(WAIT_S)
        finally:
            await trainer.close()
            await site.kill()
