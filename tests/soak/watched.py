"""The service as it is served, with a book of what it holds: `python -m tests.soak.watched CONFIG BOOK`.

A line of JSON at the end of every pause, and one when it has stopped.

| key | |
|---|---|
| `ticket` | of the pause; null in the last line |
| `live` | handles that have not ended |
| `reachable` | those that a sample of the buffer, of a lease or of a running group owns |
| `lost` | handles that were forgotten by their holder |
| `made` | handles there ever were |
| `rss` | resident memory, bytes |
| `bytes` `blocks` | in use, as `heap.py` counts |
| `tasks` | of the event loop |

Invariants:
- Nothing of the service is changed, but that its garbage is collected before it is counted.
- What is read is read at moments at which no answer is being taken in.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollout_svc import hosting
from rollout_svc.configfile import load_config
from rollout_svc.events import PauseFinished
from rollout_svc.gate import LANES
from rollout_svc.serve import serve
from rollout_svc.service import RolloutService
from rollout_svc.tensors import Handle
from tests.chaos.leaks import resident_bytes
from tests.soak.heap import heap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout_svc.assembly import Parts
    from rollout_svc.group import Group


def groups_of(parts: Parts) -> Iterator[Group]:
    """Every group that somebody owns: unfinished, ready, leased, running."""
    yield from parts.buffer.unfinished_groups()
    yield from parts.buffer.ready_groups()
    for lease in parts.buffer.leases:
        yield from lease.groups
    for run in parts.rollouts.runs(LANES):
        yield run.group


def entry(parts: Parts, ticket: int | None) -> dict[str, Any]:
    """One line of the book."""
    owned = {
        id(sample.experts)
        for group in groups_of(parts)
        for sample in group.samples
        if isinstance(sample.experts, Handle) and sample.experts.alive
    }
    handles = parts.handles
    return {
        "ticket": ticket,
        "live": sum(tally.handles for tally in handles.live.values()),
        "reachable": len(owned),
        "lost": handles.lost.total(),
        "made": handles.made.total(),
        "rss": resident_bytes(),
        **heap()._asdict(),
        "tasks": len(asyncio.all_tasks()),
    }


class Watched(RolloutService):
    """A service that keeps the book."""

    book: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bus.subscribe(PauseFinished, lambda pause: self.note(pause.ticket))

    def note(self, ticket: int | None) -> None:
        """Write a line."""
        with self.book.open("ab") as file:
            file.write(orjson.dumps(entry(self.parts, ticket)) + b"\n")

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop, and say what is left."""
        await super().stop(*args, **kwargs)
        self.note(None)


def main(config: str, book: str) -> int:
    """Serve until a signal; returns the exit code."""
    Watched.book = Path(book)
    vars(hosting)["RolloutService"] = Watched
    return serve(load_config(Path(config)), "warning")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
