"""What has to hold after every turn of the loop, whatever happened in it, and what is looked at event by event.

Each check names its promise. Cheap ones run every turn, recounts every few turns.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from rollout_svc.events import (
    BatchAcked,
    BatchTaken,
    ComponentDied,
    EvaluationFinished,
    EvaluationStarted,
    Event,
    GroupAdmitted,
    GroupFinished,
    GroupHandedBack,
    GroupSettled,
    LeaseExpired,
    PauseFinished,
    PauseStarted,
    ProducerWaiting,
    RequestAborted,
    RequestRetried,
    Resumed,
    RungReached,
    SampleFailed,
    WeightsUpdated,
    WorkerChanged,
)
from rollout_svc.gate import LANES, Lane, Mode
from rollout_svc.judging import JudgeCall
from rollout_svc.ledger import SETTLED, Account, Ledger
from rollout_svc.producer.masking import spent
from tests.simulation.handles import HandleWatch

if TYPE_CHECKING:
    from rollout_svc.assembly import Parts
    from rollout_svc.group import Group
    from rollout_svc.ledger import _Book
    from rollout_svc.pause.climb import Climb
    from rollout_svc.sample import Sample
    from tests.simulation.life import Life

__all__ = ["Invariants"]

_RECOUNT_TURNS: Final = 40
_WOKEN_S: Final = 8 / 1024  # a few ticks of the loop
_DRAINS: Final = ("pause:", "drain:", "count:")  # tasks that stop what runs: the failure of one thing ends none
_TOLD: Final = (
    GroupFinished,
    GroupHandedBack,
    GroupSettled,
    BatchTaken,
    BatchAcked,
    LeaseExpired,
    ProducerWaiting,
    RequestRetried,
    WorkerChanged,
    WeightsUpdated,
    EvaluationStarted,
    EvaluationFinished,
)


class Invariants:
    """The standing checks on one life."""

    def __init__(self, life: Life) -> None:
        self.admitted = 0
        self.pauses = 0
        self.lanes: frozenset[Lane] = frozenset()  # of the climb under way, or the last one
        self._life = life
        self._world = life.world
        self._climb: Climb | None = None  # the one under way, or the last
        self.watch = HandleWatch(life)
        self._at_step_end = False
        self._grown, self._grown_at = 0, 0.0
        self._turns = 0
        self._parts: Parts | None = None
        self._groups: _Book
        self._guests: _Book  # groups of lane eval
        self._books: tuple[_Book, ...] = ()
        self._kept: dict[str, bytes | None] = {}
        self._modes: dict[Lane, Mode | None] = {}
        self._closed_at: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._judging: dict[Lane, frozenset[JudgeCall]] = {}
        for kind in _TOLD:
            life.bus.subscribe(kind, self._tell)
        life.bus.subscribe(GroupAdmitted, self._admitted)
        life.bus.subscribe(GroupFinished, self._finished)
        life.bus.subscribe(GroupSettled, self._settled)
        life.bus.subscribe(SampleFailed, self._failed)
        life.bus.subscribe(RequestAborted, self._aborted)
        life.bus.subscribe(PauseStarted, self._pause_started)
        life.bus.subscribe(RungReached, self._rung)
        life.bus.subscribe(PauseFinished, self._pause_finished)
        life.bus.subscribe(Resumed, self._resumed)
        life.bus.subscribe(ComponentDied, self._died)
        for end in (BatchAcked, GroupSettled, SampleFailed, PauseFinished):
            life.bus.subscribe(end, self._step_ended)

    def begin(self) -> None:
        """The service has its parts: watch its gate and its ledger."""
        self._parts = self._life.parts
        train, evaluated = self._parts.ledger, self._parts.evaluations.ledger
        self._groups, self._guests = train._groups, evaluated._groups
        self._books = (train._groups, train._samples, evaluated._groups, evaluated._samples)
        self._life.parts.gate.subscribe(self._gate_changed)
        if self._parts.experts.enabled:
            self._parts.pool.subscribe(self._life.witness.unpacked)

    # -- events ----------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if not self._world.telling:
            return
        names = [getattr(event, field.name) for field in fields(event) if field.name not in ("metrics", "traceback")]
        self._world.say("service", type(event).__name__, *names)

    def _step_ended(self, _: Event) -> None:
        self._at_step_end = True

    def _admitted(self, event: GroupAdmitted) -> None:
        self.admitted += 1
        parts = self._life.parts
        self._world.say("service", "admits", event.group_id[-6:], event.task)
        self._world.require(bool(parts.pool.active), "P18", f"{event} although no worker is in traffic")
        self._world.require(parts.gate.is_open("train"), "P9", f"{event} while the gate is closed")
        self._world.require(
            not parts.buffer.full, "bytes", f"{event} although the buffer is full: {parts.buffer.bytes}"
        )
        limit = next(task.max_groups for task in self._life.config.tasks if task.name == event.task)
        held = parts.producer.mixture.unsettled(event.task)
        self._world.require(limit is None or held <= limit, "P33", f"{event}: {held} groups of {limit}")
        self._check_window(event)

    def _check_window(self, event: GroupAdmitted) -> None:
        """At a batch a step, every group that is out, this one included, is handed over within the bound."""
        parts, trainer = self._life.parts, self._life.config.trainer
        demand, tail = parts.batches.demand, parts.producer.tail
        waiting = {group.group_id for group in tail.groups()}
        masked = trainer.max_token_staleness
        serves = trainer.max_staleness if masked is None else masked
        oldest = demand.next_step - trainer.max_staleness
        out = 1 + sum(
            group.account != "leased" and group.group_id not in waiting
            for group in self.groups()
            if group.account != "ready" or (group.oldest >= oldest and not spent(group, demand.next_step - serves))
        )
        turn = demand.next_step + (out - 1) // max(trainer.train_batch_size, demand.asked)
        late = turn - demand.version > serves
        self._world.require(not late or serves == 0, "P32", f"{event} is the {out}th at {demand}")

    def _settled(self, event: GroupSettled) -> None:
        """A filter's verdict is the one thing that filters a group."""
        if event.outcome == "filtered":
            said = self._world.asked.get(event.group_id)
            self._world.require(said == event.reason, "P2", f"{event}, but its filter said {said}")

    def _finished(self, event: GroupFinished) -> None:
        if self._life.service.prepared.runtimes[event.task].filter is not None:
            said = self._world.asked.get(event.group_id)
            self._world.require(said == "kept", "P2", f"group {event.group_id} is kept, but its filter said {said}")
        known = event.group_id in self._world.journal
        self._world.require(known, "P31", f"group {event.group_id} is ready before it is durable")

    def _failed(self, event: SampleFailed) -> None:
        self._world.say("service", "fails", event.sample_id[-8:], event.reason, event.failures, event.message[:80])
        if not event.reason.startswith(("judge", "filter")):
            self._life.witness.failed(event.sample_id)
        self._world.require(event.reason != "internal", "bug", event.message)

    def _aborted(self, event: RequestAborted) -> None:
        if event.reason == "pause":
            lane, closed = self._life.lane(event.sample_id), self.lanes
            self._world.require(lane in closed, "P15", f"{event} by a pause of {sorted(closed)}")

    def _pause_started(self, event: PauseStarted) -> None:
        self._world.say("service", "pauses", event.ticket, event.mode, event.lanes, round(event.deadline_s, 4))
        self.lanes = self.lanes | set(event.lanes) if event.joined else frozenset(event.lanes)
        climb = self._life.parts.pauses._climb
        grown = climb.grown if event.joined and climb is not None else 0
        if grown != self._grown or not event.joined:
            self._grown, self._grown_at = grown, self._world.now
        if not event.joined:
            self.pauses += 1
            self._world.faults.stands("gate")

    def _rung(self, event: RungReached) -> None:
        self._world.say("service", "reaches", event.name, event.pending)
        self._world.faults.stands(event.name)
        climb = self._climb = self._life.parts.pauses._climb
        if event.name != "gate":
            self._check_retries()
        if event.name == "http" and climb is not None:
            self._life.wire_log.check_survivors(climb)
        if event.name == "judges" and climb is not None:
            for call in self._life.parts.judging.calls:
                if call.lane not in climb.lanes:
                    continue
                for verdict in reversed(self._world.verdicts):
                    if not verdict.done and call.sample_ids[0] in verdict.ids and not call.outcome.done():
                        verdict.void = True
                        break

    def _check_retries(self) -> None:
        """A back-off sleep ends when the gate closes."""
        parts = self._life.parts
        for sample_id, wait in parts.pool.line.waits.items():
            sample = self._life.sample(sample_id)
            lane = self._life.lane(sample_id)
            if wait.where == "retrying" and sample is not None and not parts.gate.is_open(lane):
                asleep_s = self._world.now - max(wait.since, self._closed_at[lane])
                self._world.require(asleep_s < _WOKEN_S, "P20", f"{sample} sleeps before its next try, while closed")

    def _pause_finished(self, event: PauseFinished) -> None:
        self._world.say("service", "paused", event.ticket, event.clean, round(event.elapsed_s, 4), event.abandoned)
        self._world.faults.stands("paused")
        for lane in self.lanes:
            self._no_judge_starts(lane)
        self._check_retries()
        if self._climb is not None:
            self._life.wire_log.check_counts(self._climb, self._grown_at)

    def _resumed(self, event: Resumed) -> None:
        self._world.say("service", "resumes", event.ticket, event.lanes)
        self._world.faults.stands("running")
        self._world.resumed()

    def _died(self, event: ComponentDied) -> None:
        promise = "P12" if event.component.startswith(_DRAINS) else "bug"
        self._world.breaks(promise, f"{event.component} died: {event.error}\n{event.traceback}")

    def _gate_changed(self, lane: Lane) -> None:
        mode = self._life.parts.gate.mode(lane)
        before, self._modes[lane] = self._modes.get(lane), mode
        if before is None:
            self._closed_at[lane] = self._world.now
        if mode is None or (mode == "wait" and before != mode):  # a wait is for what runs, judges included
            self._judging.pop(lane, None)
        else:
            self._no_judge_starts(lane)

    def _no_judge_starts(self, lane: Lane) -> None:
        if lane not in self._judging:
            self._judging[lane] = frozenset(call for call in self._life.parts.judging.calls if call.lane == lane)

    # -- turns -----------------------------------------------------------------------------------------------

    def after_turn(self) -> None:
        """Look at everything cheap, and at the rest now and then."""
        parts, witness = self._parts, self._life.witness
        assert parts is not None
        if witness.touched or witness.touched_invalid:
            witness.after_turn()
        groups, buffer = self._groups.counts, parts.buffer
        for book in self._books:
            if sum(book.counts.values()) != book.admitted:
                self._world.breaks("P1", f"{book.unit} do not balance: {book.as_json()}")
        guests = self._guests.counts["in_flight"]
        if (
            len(parts.rollouts._runs) - guests != groups["in_flight"]
            or len(buffer._unfinished) != groups["aborted"]
            or len(buffer._ready) != groups["ready"]
            or groups["queued"]
        ):
            found = (len(parts.rollouts._runs) - guests, buffer.unfinished, buffer.ready)
            self._world.breaks("P1", f"runs, unfinished, ready are {found}, counted {groups}")
        if self._judging:
            self._check_judges()
        if self._at_step_end and parts.experts.enabled:
            self.watch.check(self.groups())
        self._at_step_end = False
        self._turns += 1
        if self._turns % _RECOUNT_TURNS == 0:
            self.recount()

    def _check_judges(self) -> None:
        for call in self._life.parts.judging._calls:
            known = self._judging.get(call.lane)
            if known is not None and call not in known:
                self._world.breaks("P13", f"a judge of {call.sample_ids} starts while lane {call.lane} is closed")

    def groups(self) -> list[Group]:
        """Every group of training that the service holds."""
        parts = self._life.parts
        leased = [group for lease in parts.buffer.leases for group in lease.groups]
        runs = [run.group for run in parts.rollouts._runs.values() if run.host is None]
        return [*runs, *parts.buffer._unfinished.values(), *parts.buffer.ready_groups(), *leased]

    def recount(self) -> None:
        """Count groups and samples one by one, and look at what must not have changed."""
        parts, require = self._life.parts, self._world.require
        groups = self.groups()
        ids = [group.group_id for group in groups]
        require(len(ids) == len(set(ids)), "P1", f"a group is in two places: {sorted(ids)}")
        strangers = [group for group in groups if group.lane != "train"]
        require(not strangers, "P1", f"training has groups of another lane: {strangers}")
        evaluated = [g for e in parts.evaluations._open.values() for g in e.groups if not g.settled]
        self._recount(parts.ledger, groups)
        self._recount(parts.evaluations.ledger, evaluated)
        generating = sum(e.generating for e in parts.evaluations._open.values())
        within = generating <= self._life.config.evaluation.max_in_flight
        require(within, "P1", f"{generating} evaluations generate at once")
        require(
            parts.ledger.unsettled_groups <= self._life.service.fleet.plan.max_groups,
            "P1",
            f"{parts.ledger.unsettled_groups} groups are admitted and not consumed",
        )
        finished = sum(group.payload_bytes for group in groups if group.account in ("ready", "leased"))
        require(parts.buffer.bytes == finished, "bytes", f"{finished} are held, {parts.buffer.bytes} counted")
        if parts.experts.enabled:
            self.watch.check(groups)
        in_flight = dict.fromkeys(parts.pool.in_flight, 0)
        for worker in parts.pool.workers.values():
            for call in worker.calls.values():
                in_flight[call.lane] += 1
        require(in_flight == parts.pool.in_flight, "P1", f"calls are {in_flight}, counted {parts.pool.in_flight}")
        for worker in parts.pool.workers.values():
            require(bool(worker.tokens) == bool(worker.calls), "routing", f"{worker} has {worker.tokens} tokens")

    def _recount(self, ledger: Ledger, groups: list[Group]) -> None:
        require = self._world.require
        held = sum(n for account, n in ledger._groups.counts.items() if account not in SETTLED)
        require(len(groups) == held, "P1", f"{len(groups)} groups are held, the ledger has {held}")
        samples: dict[Account, int] = {}
        for group in groups:
            for sample in group.samples:
                samples[sample.account] = samples.get(sample.account, 0) + 1
                self._check_kept(sample)
        counted = {a: n for a, n in ledger._samples.counts.items() if n and a not in SETTLED}
        require(samples == counted, "P1", f"samples are {samples}, counted {counted}")

    def _check_kept(self, sample: Sample) -> None:
        """A completed member stays as it is, whatever becomes of its siblings."""
        known = self._kept.get(sample.sample_id)
        if sample.packed is not None:
            if known is not None and known is not sample.packed:
                self._world.breaks("P5", f"{sample} was completed twice")
            if known is None:
                self._life.witness.completed(sample)
            self._kept[sample.sample_id] = sample.packed
        elif known is not None and not sample.settled:
            self._world.breaks("P5", f"{sample} had been completed")
