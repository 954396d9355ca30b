"""The journal behind the storage port: the buffer survives a killed process.

Invariants:

- Noting takes what is immutable, or encodes what is small and may change; a thread does the rest. The loop never waits.
- What is noted is noted once: a sample that is as it was noted last is not written again. Routed experts are written
  when their handle is another one than the sample was noted with, and only then. The thread reads them, for a store may
  block; what is noted keeps their bytes, so that they may be released before they are written.
- A journal that failed says so once, by `on_failure`, and fails every `flush` and `save` from then on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self
from weakref import ref

import orjson

from rollout_svc.buffer.journal import notes
from rollout_svc.buffer.journal.fingerprint import Fingerprint
from rollout_svc.buffer.journal.opening import open_journal, refusal
from rollout_svc.buffer.journal.reading import read_journal
from rollout_svc.buffer.journal.records import encode_prompt, state_json
from rollout_svc.buffer.journal.tables import Tables
from rollout_svc.buffer.journal.writer import Writer
from rollout_svc.buffer.recovered import Position, Recovered
from rollout_svc.buffer.replay import Lease
from rollout_svc.buffer.snapshots import Snapshot, write_snapshot
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.sample.state import SampleState
from rollout_svc.segment import Segment

__all__ = ["Journal"]

_Mark = tuple[str, int, int, int, int]  # of a sample as it was noted: status, attempt, failures, turn, tokens
_Routed = Callable[[], object]  # gives the handle of the routed experts a sample was noted with, while it is there


class Journal:
    """Groups, leases and positions in a file; see the module's invariants."""

    def __init__(
        self, connection: sqlite3.Connection, recovered: Recovered, *, keep_steps: int, wall: Callable[[], float]
    ) -> None:
        """Take over an open database; see `open`."""
        self._recovered = recovered
        self.ledger: Ledger | None = None
        self.on_failure: Callable[[BaseException], None] = lambda _: None
        self._connection = connection
        self._tables = Tables(connection, keep_steps)
        self._wall = wall
        self._writer: Writer[notes.Note] | None = None
        self._marks: dict[str, list[_Mark | None]] = {
            group.group_id: [_mark_found(state) for state in group.samples] for group in recovered.groups
        }
        self._routed: dict[str, dict[int, _Routed]] = {}
        for group in recovered.groups:
            for index, state in enumerate(group.samples):
                if state.experts is not None:
                    self._routed.setdefault(group.group_id, {})[index] = _unknown
        self._tallies = (recovered.late_discarded, recovered.redone)

    @classmethod
    def open(
        cls,
        path: Path,
        fingerprint: Fingerprint,
        *,
        keep_steps: int,
        synchronous: str = "normal",
        wall: Callable[[], float] = time.time,
    ) -> Self:
        """Open a journal, or make it, and read what is there. Blocks: call it in a thread, before anything starts.

        Args:
            path: of the file.
            fingerprint: what it must belong to; see `fingerprint.fingerprint_of`.
            keep_steps: trainer steps for which the prompts of consumed groups are kept.
            synchronous: `normal`, or `full`: see `schema`.
            wall: wall-clock time, seconds since the epoch.

        Raises:
            ConfigError: at `buffer.path`; the file is as it was.
        """
        connection = open_journal(path, fingerprint, synchronous)
        try:
            return cls(connection, read_journal(connection), keep_steps=keep_steps, wall=wall)
        except Exception as error:
            connection.close()
            raise refusal(path, f"is damaged: {type(error).__name__}: {error}") from error

    def start(self) -> Writer[notes.Note]:
        """Begin to write; in the loop whose notes these will be."""
        self._writer = Writer(self._connection, lambda some: self._tables.write(*some), on_failure=self._failed)
        return self._writer

    def recover(self) -> Recovered:
        """What an earlier life left: handed over, for it may be large."""
        recovered, self._recovered = self._recovered, Recovered()
        return recovered

    @property
    def writer(self) -> Writer[notes.Note]:
        """The thread that writes."""
        return self._writer or self.start()

    # -- prompts ---------------------------------------------------------------------------------------------

    def pushed(self, task: str, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Note new lines."""
        if lines:
            encoded = tuple((prompt_id, orjson.dumps(line)) for prompt_id, line in lines.items())
            self._note(notes.Pushed(task, encoded))

    def admitted(self, group: Group, position: Position | None) -> None:
        """Note a group and its source's position, as one."""
        prompt = group.prompt
        state = None if position is None or position.state is None else orjson.dumps(position.state)
        self._marks[group.group_id] = [None] * len(group.samples)
        self._note(
            notes.Admitted(
                group_id=group.group_id,
                task=prompt.task,
                prompt_id=prompt.prompt_id,
                prompt=encode_prompt(prompt),
                ids=prompt.input_ids,
                size=len(group.samples),
                used=None if position is None else position.used,
                source_state=state,
            )
        )

    # -- work ------------------------------------------------------------------------------------------------

    def kept(self, sample: Sample, more: Segment | None = None) -> None:
        """Note a sample that is not as it was noted last."""
        members = self._members((sample,), more)
        if members:
            self._note(notes.Kept(members))

    def handed_back(self, group: Group) -> None:
        """Note a group that goes on later."""
        self._note(notes.HandedBack(group.group_id, group.hand_backs, group.cuts, self._members(group.samples)))

    async def save(self, group: Group) -> None:
        """Make a group ready, durably."""
        self._note(notes.Saved(group.group_id, self._members(group.samples)))
        await self.flush()

    def settled(self, group: Group, *, again: bool = False) -> None:
        """Note the end of a group without a trainer."""
        self._forget(group)
        self._note(notes.Settled(group.group_id, group.account, again))
        self._tell_tallies()

    # -- trainers --------------------------------------------------------------------------------------------

    def leased(self, lease: Lease) -> None:
        """Note a lease; its end as wall-clock time, for another life has another loop."""
        ends = self._wall() + lease.expires_at - asyncio.get_running_loop().time()
        metrics = orjson.dumps(lease.metrics)
        self._note(notes.Leased(lease.batch_id, lease.step, _ids(lease), ends, metrics))

    def unleased(self, lease: Lease) -> None:
        """Note the end of a lease by time."""
        self._note(notes.Unleased(lease.batch_id, _ids(lease)))

    def consumed(self, lease: Lease) -> None:
        """Note the end of a lease by its ack."""
        for group in lease.groups:
            self._forget(group)
        self._note(notes.Consumed(lease.batch_id, lease.step, _ids(lease)))
        self._tell_tallies()

    def versioned(self, version: int, path: str | None = None) -> None:
        """Note the fleet's version, and where its weights can be loaded from again."""
        self._note(notes.Versioned(version, path))

    # -- life ------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Return once everything noted so far is durable; raises JournalFailed."""
        await self.writer.flush()

    async def snapshot(self, target: Path, step: int, over: Callable[[], bool], within_s: float) -> Snapshot:
        """Copy everything noted so far into one file, and go on writing meanwhile; see `snapshots.write_snapshot`."""
        writer = self.writer

        def between() -> None:
            if over():
                raise TimeoutError(f"copying to {target} took too long")
            writer.catch_up()

        return await writer.run(lambda connection: write_snapshot(connection, target, step, between), within_s)

    async def close(self) -> None:
        """Write what is left, and close the file; idempotent."""
        await self.writer.close()

    def _failed(self, error: BaseException) -> None:
        self.on_failure(error)  # whoever is told now, not when the thread began

    def _note(self, note: notes.Note) -> None:
        self.writer.put(note)

    def _members(self, samples: Iterable[Sample], more: Segment | None = None) -> tuple[notes.Member, ...]:
        """The samples that are not as they were noted last, as they are now."""
        members: list[notes.Member] = []
        for sample in samples:
            marks = self._marks.get(sample.group_id)
            if marks is None or sample.settled:
                continue
            mark = _mark_of(sample, more)
            known = marks[sample.index] == mark
            if known and sample.status is SampleStatus.COMPLETED:
                continue
            routed = self._reroute(sample)
            if routed or not known:
                marks[sample.index] = mark
                state = sample.state(more, experts=False)
                if routed and sample.experts is not None:
                    state = state._replace(experts=sample.experts.later())
                members.append(notes.Member(sample.group_id, sample.index, state, state_json(state), routed))
        return tuple(members)

    def _reroute(self, sample: Sample) -> bool:
        """Remember the handle of a sample's routed experts; returns whether it is another than before."""
        handle, noted = sample.experts, self._routed.get(sample.group_id)
        if handle is None:
            return noted is not None and noted.pop(sample.index, None) is not None
        before = None if noted is None else noted.get(sample.index)
        if before is not None and before() is handle:
            return False
        self._routed.setdefault(sample.group_id, {})[sample.index] = ref(handle)
        return True

    def _forget(self, group: Group) -> None:
        self._marks.pop(group.group_id, None)
        self._routed.pop(group.group_id, None)

    def _tell_tallies(self) -> None:
        """Note the tallies beside the accounts, where they changed."""
        if self.ledger is not None:
            tallies = (self.ledger.late_discarded, self.ledger.redone)
            if tallies != self._tallies:
                self._tallies = tallies
                self._note(notes.Tallied(*tallies))


def _unknown() -> None:
    """The handle that routed experts of an earlier life were noted with."""


def _mark_of(sample: Sample, more: Segment | None) -> _Mark:
    length = sample.response_length + (len(more.ids) if more is not None else 0)
    if sample.status is SampleStatus.COMPLETED:
        return (sample.status, 0, 0, 0, length)  # nothing of it changes any more
    return (sample.status, sample.attempt, sample.failures, sample.turn, length)


def _mark_found(state: SampleState) -> _Mark | None:
    """What is in the file already; an unfinished sample goes on at once, and is noted again."""
    return (SampleStatus.COMPLETED, 0, 0, 0, state.length) if state.packed is not None else None


def _ids(lease: Lease) -> tuple[str, ...]:
    return tuple(group.group_id for group in lease.groups)
