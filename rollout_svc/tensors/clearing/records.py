"""What a clear tells whoever asked for it, and the log."""

from __future__ import annotations

from typing import NamedTuple

import structlog

from rollout_svc.tensors.clearing.plan import Failure
from rollout_svc.tensors.clearing.roles import Roles
from rollout_svc.tensors.clearing.watch import Figures, Leak

__all__ = ["Cleared", "Statistics", "log_cleared"]

_log = structlog.get_logger("tensors")


class Statistics(NamedTuple):
    """What every process holds.

    Attributes:
        figures: of each process that answered.
        silent: addresses of those that did not.
    """

    figures: tuple[Figures, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def entries(self) -> int:
        """Tensors that are held, in fetch buffers and by owners."""
        return sum(one.cached.entries + one.owned.entries for one in self.figures)

    @property
    def bytes(self) -> int:
        """Bytes of those."""
        return sum(one.cached.bytes + one.owned.bytes for one in self.figures)


class Cleared(NamedTuple):
    """What became of a clear.

    Attributes:
        ids: of the batch: how many.
        processes: that were asked.
        kept: what failed for the first time; it is tried once more with the next clear.
        given_up: what failed with the clear before and again now; never tried again.
        statistics: what every process holds afterwards.
        leaks: what of it belongs to no live batch.
        expired: by owner, leases that ended since the clear before: ids that nobody cleared.
        elapsed_s: how long it took.
    """

    ids: int = 0
    processes: int = 0
    kept: tuple[Failure, ...] = ()
    given_up: tuple[Failure, ...] = ()
    statistics: Statistics = Statistics()
    leaks: tuple[Leak, ...] = ()
    expired: tuple[tuple[str, int], ...] = ()
    elapsed_s: float = 0.0

    @property
    def entries(self) -> int:
        """Tensors that are held anywhere."""
        return self.statistics.entries

    @property
    def bytes(self) -> int:
        """Bytes of those."""
        return self.statistics.bytes


def log_cleared(cleared: Cleared, roles: Roles) -> None:
    """Say what went wrong, loudly, or at debug that nothing did."""
    for failures, event, level in (
        (cleared.kept, "shards.drain_kept", _log.warning),
        (cleared.given_up, "shards.drain_failed", _log.error),
    ):
        for process, verb, ids, why in failures:
            level(event, process=process, roles=roles.parts(process), verb=verb, ids=len(ids), why=why)
    for leak in cleared.leaks:
        _log.warning(
            "shards.leaked",
            process=leak.process,
            roles=leak.parts,
            where=leak.where,
            entries=leak.entries,
            bytes=leak.bytes,
            ids=leak.ids,
        )
    for process, count in cleared.expired:
        _log.warning("shards.expired", process=process, roles=roles.parts(process), shards=count)
    if not (cleared.kept or cleared.given_up or cleared.leaks or cleared.expired):
        _log.debug("shards.cleared", ids=cleared.ids, processes=cleared.processes, elapsed_s=cleared.elapsed_s)
