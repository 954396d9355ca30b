"""Rounds: start, work, kill at some moment, start again, account.

- A chapter is a dataset, a journal and as many rounds as it takes to consume nearly all; then it is consumed to the
  last prompt without a kill, and the books must close.
- The seed decides what is done and when it is cut off; what the machine makes of it is its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from bench.process import Child
from rollout_svc.errors import NotNow, Unreachable
from tests.durability.books import Books
from tests.durability.site import GROUP_SIZE, Dataset, Site
from tests.durability.trainer import Trainer

__all__ = ["MOMENTS", "Tally", "run"]

MOMENTS: Final = {
    "start": 2,
    "work": 3,
    "take": 3,
    "ack": 3,
    "push": 3,
    "pause": 2,
    "paused": 1,
    "resume": 1,
    "checkpoint": 2,
    "restore": 2,
}
"""When it is killed, and how often in comparison."""
_WITHIN_S: Final = {"take": 0.03, "ack": 0.004, "push": 0.004, "pause": 0.01, "resume": 0.004, "checkpoint": 0.03}
"""The kill comes so long after the call, at most: about as long as the call takes."""
_ANSWERED: Final = 0.3  # share of the calls that are answered first, so that the kill comes right after
_ANSWERED_S: Final = 5.0
_WORK_S: Final = (0.05, 0.5)
_SNAPSHOTS: Final = ("snapshot0.db", "snapshot1.db")
_LINES: Final = 40
_PASSES: Final = 6
_MOST_PUSHED: Final = 120
_ENDING: Final = 24  # prompts left at which a chapter ends
_FINISH_S: Final = 60.0
_LEASES_S: Final = (600.0, 1.5)


@dataclass(slots=True)
class Tally:
    """What was done."""

    kills: Counter[str] = field(default_factory=Counter)
    unanswered: Counter[str] = field(default_factory=Counter)
    restarts_s: list[float] = field(default_factory=list)
    chapters: int = 0
    prompts: int = 0
    batches: int = 0

    @property
    def rounds(self) -> int:
        """Kills of all kinds."""
        return self.kills.total()


@dataclass(slots=True)
class _Snapshot:
    path: Path
    books: Books
    step: int


class _Chapter:
    """One journal, from the first prompt to the last."""

    def __init__(self, folder: Path, ports: list[int], rng: Random, tally: Tally, number: int) -> None:
        self.rng = rng
        self.tally = tally
        self.lease_s = _LEASES_S[number % len(_LEASES_S)]
        dataset = Dataset(_LINES, _PASSES, seed=rng.randrange(1000))
        self.site = Site(folder, ports, dataset, self.lease_s)
        books = Books(dataset.answers, _PASSES, GROUP_SIZE, self.lease_s)
        self.trainer = Trainer(books, rng, _MOST_PUSHED)
        self.snapshot: _Snapshot | None = None
        self.moment = ""

    async def start(self, *flags: str) -> None:
        """Start the service, and find out where the last life ended."""
        await self.site.start(*flags)
        await self.trainer.meet(self.site.url)
        await self.trainer.settle()

    async def round(self) -> None:
        """Work a little, and be killed at a moment."""
        moments = [moment for moment in MOMENTS if moment != "restore" or self.snapshot is not None]
        self.moment = moment = self.rng.choices(moments, [MOMENTS[name] for name in moments])[0]
        if moment == "start":
            await self._killed_in_start()
        else:
            if not self.site.runs:
                await self.start()
            await self.trainer.work(time.time() + self.rng.uniform(*_WORK_S))
            await self._killed_in(moment)
        self.tally.kills[moment] += 1
        if moment == "restore":
            await self._restore()

    async def _killed_in_start(self) -> None:
        """A start that is cut off, anywhere between its first instruction and its first answer."""
        await self.site.kill()
        last_s = self.site.restarts_s[-1] if self.site.restarts_s else 1.0
        await self.site.spawn()
        await asyncio.sleep(self.rng.uniform(0.0, 1.2 * last_s))
        await self.site.kill()
        self.tally.unanswered["start"] += 1

    async def _killed_in(self, moment: str) -> None:
        call = await self._call_of(moment)
        if call is not None:
            under_way = asyncio.ensure_future(call())
            late_s = _ANSWERED_S if self.rng.random() < _ANSWERED else self.rng.uniform(0.0, _WITHIN_S[moment])
            await asyncio.wait({under_way}, timeout=late_s)
            self.tally.unanswered[moment] += not under_way.done()
            await self.site.kill()
            with contextlib.suppress(Unreachable, NotNow):
                await under_way
        await self.site.kill()

    async def _call_of(self, moment: str) -> Callable[[], Awaitable[None]] | None:
        """What is under way when the kill comes; None: nothing, or it is over."""
        trainer, lent = self.trainer, list(self.trainer.books.lent.values())
        acks = tuple(held.batch_id for held in lent if self.rng.random() < 0.5)
        if moment == "take":
            return lambda: trainer.take(self.rng.randint(1, 4), acks)
        if moment == "ack" and lent:
            batch_id = self.rng.choice(lent).batch_id
            return lambda: trainer.ack(batch_id)
        if moment == "push":
            return lambda: trainer.push(self.rng.randint(1, 6))
        if moment == "pause":
            return trainer.pause
        if moment in ("paused", "resume"):
            await trainer.pause()
            return trainer.resume if moment == "resume" else None
        if moment == "checkpoint":
            path = self.site.folder / self.rng.choice(_SNAPSHOTS)
            return lambda: self._checkpoint(path, acks)
        return None

    async def _checkpoint(self, path: Path, acks: tuple[str, ...]) -> None:
        """Write a snapshot; it is one to go back to once it was answered."""
        if self.snapshot is not None and self.snapshot.path == path:
            self.snapshot = None  # whatever lies there may be replaced from now on
        await self.trainer.checkpoint(path, acks)
        self.snapshot = _Snapshot(path, self.trainer.books.copy(), self.trainer.step)

    def check_snapshot(self) -> None:
        """What lies at a snapshot's place is whole, whenever the kill came."""
        for path in self.site.folder.glob("snapshot*"):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as found:
                assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)

    async def _restore(self) -> None:
        """Throw the journal away, go back to the snapshot, or to a step before it."""
        assert self.snapshot is not None
        for path in self.site.folder.glob("journal.db*"):
            path.unlink()
        step = self.rng.randint(max(0, self.snapshot.step - 8), self.snapshot.step)
        books = self.snapshot.books.copy()
        books.go_back(step)
        self.trainer.go_back(books, step)
        await self.start("--restore", str(self.snapshot.path), "--restore-step", str(step))

    async def finish(self) -> None:
        """Consume the rest, and close the books."""
        self.moment = "finish"
        if not self.site.runs:
            await self.start()
        await self.trainer.finish(_FINISH_S)
        self.tally.chapters += 1
        self.tally.prompts += self.trainer.books.consumed.total()
        self.tally.batches += self.trainer.books.batches

    async def close(self) -> None:
        """End what runs; idempotent."""
        await self.trainer.close()
        await self.site.kill()
        self.tally.restarts_s += self.site.restarts_s


async def run(rounds: int, seed: int, say: Callable[[str], None]) -> Tally:
    """Run so many rounds.

    Raises:
        AssertionError: a promise was broken; the folder with journal and log is kept and named.
    """
    rng = Random(seed)
    tally = Tally()
    with Child("tests.durability.engine") as engine:
        ports = [int(port) for port in engine.ready_line]
        while tally.rounds < rounds:
            folder = Path(tempfile.mkdtemp(prefix="durability-"))
            chapter = _Chapter(folder, ports, rng, tally, tally.chapters)
            try:
                while tally.rounds < rounds and chapter.trainer.books.left > _ENDING:
                    await chapter.round()
                    chapter.check_snapshot()
                    say(f"{tally.rounds} of {rounds}: {chapter.moment}; {chapter.trainer.books.left} prompts left")
                await chapter.finish()
            except BaseException:
                say(f"round {tally.rounds}, {chapter.moment}, leases of {chapter.lease_s:g} s; see {folder}")
                say(chapter.site.tail())
                raise
            finally:
                await chapter.close()
            shutil.rmtree(folder)
    return tally
