"""Sees every call of one life of the service pass by, and compares it with what engines really did.

Invariants checked here, at the moment they would break: P2 P3 P4 P5 P6 P7 P9 P10 P17 P20 P24 P27 P28.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.engines import Endpoint, Reply
from rollout_svc.engines.calls import Call
from rollout_svc.gate import LANES, Lane
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.workers.call import EngineCall
from rollout_svc.workers.worker import Worker, WorkerState
from tests.simulation.engine import Request, SimEngine
from tests.simulation.routing import may_lack, problem
from tests.simulation.tokens import FIRST_MADE

if TYPE_CHECKING:
    from tests.simulation.life import Life

__all__ = ["Shadow", "Witness"]

_S: Final = SampleStatus
_GOING_ON: Final = frozenset({_S.GENERATED, _S.JUDGING, _S.COMPLETED})
_TRIED: Final = frozenset({WorkerState.QUARANTINED, WorkerState.RECOVERING, WorkerState.DEAD})
"""Workers whose engine may be asked for a token that nobody waits for: they get no traffic."""


class Shadow:
    """What the world knows of one sample: the tokens the service received for it, and whether its turn is over.

    Attributes:
        rows: of its routed experts: the number of the request each came with.
        routed: it is to have them in the end.
    """

    __slots__ = ("before", "ids", "late", "routed", "rows", "stopped", "turn")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.before: list[list[int]] = []  # what it had whenever it began again
        self.turn = 0  # model tokens of the turn under way
        self.stopped = False
        self.late = False
        self.rows: list[int] = []
        self.routed = True

    def reset(self) -> None:
        """It begins again from its prompt."""
        self.before.append(self.ids)
        self.ids, self.turn, self.stopped = [], 0, False
        self.rows, self.routed = [], True


class Witness:
    """One life's."""

    def __init__(self, life: Life) -> None:
        self.open: dict[str, Request] = {}  # sample id: its one request whose connection is open
        self.shadows: dict[str, Shadow] = {}
        self.redone: set[str] = set()  # samples that may begin again: an attempt of theirs failed
        self.crowded: dict[str, bool] = {}  # engine: it was asked for its count while calls were open there
        self._life = life
        self._world = life.world
        self.touched: list[tuple[Sample, Shadow]] = []
        self.touched_invalid: list[tuple[Sample, int]] = []  # and how often it had failed before
        self._attempts: dict[str, tuple[int, int]] = {}  # wire id: attempt, epoch at dispatch
        self._versions: dict[str, int | None] = {}  # wire id: the worker's weights at dispatch
        self._unpacking: dict[EngineCall, tuple[Endpoint, SimEngine, Request, Reply]] = {}

    def recall(self, buffer: ReplayBuffer) -> None:
        """A new life has what the ones before wrote down: tokens that came then, and no others."""
        for group in buffer.unfinished_groups():
            for sample in group.samples:
                have = sample.response_ids
                if have:
                    given = self._given_before(sample.sample_id)
                    known = any(have[:n] == ids[:n] for ids in given if (n := min(len(have), len(ids))))
                    self._world.require(known, "P31", f"{sample} has {have}, it was given {given}")
                shadow = self._shadow(sample)
                shadow.ids, shadow.turn = list(have), sample.turn_length
                shadow.stopped = bool(have) and sample.engine_finish_reason not in (None, "abort")
                self._recall_rows(sample, shadow)

    def _recall_rows(self, sample: Sample, shadow: Shadow) -> None:
        """It has rows of earlier lives, or none: then those it is not asked for again it will never have."""
        if sample.experts is None:
            shadow.routed = sample.packed is None and sample.resume_at != "judge"
            return
        count = sample.experts.shape[0]
        earlier = [life.witness.shadows.get(sample.sample_id) for life in self._world.lives[:-1]]
        shadow.rows = next((s.rows[:count] for s in reversed(earlier) if s is not None and len(s.rows) >= count), [])
        self._check_rows(sample, shadow)

    def _given_before(self, sample_id: str) -> list[list[int]]:
        """What a sample was given in earlier lives, each time it began."""
        shadows = [life.witness.shadows.get(sample_id) for life in self._world.lives[:-1]]
        return [ids for shadow in shadows if shadow is not None for ids in (*shadow.before, shadow.ids)]

    # -- generation ------------------------------------------------------------------------------------------

    def sending(self, endpoint: Endpoint, engine: SimEngine, request: Request) -> None:
        """A request is about to leave."""
        worker, breaks = self._life.worker(endpoint), self._world.breaks
        call = worker.calls.get(request.rid)
        if call is None:  # a canary
            if worker.state not in _TRIED:
                breaks("P9", f"{worker} is asked for a token nobody waits for")
            request.lane = "canary"
            return
        request.sample_id, request.lane = call.sample_id, call.lane
        gate = self._life.parts.gate
        if not gate.is_open(call.lane):
            breaks("P9", f"{call} starts while lane {call.lane} is closed")
        if worker.state is not WorkerState.ACTIVE:
            breaks("P9", f"{call} goes to {worker}")
        if call.sample_id in self.open:
            breaks("P20", f"{call} starts beside {self.open[call.sample_id]}")
        self.open[call.sample_id] = request
        if request.experts_from is not None and call.lane != "train":
            breaks("P28", f"{call} asks for routed experts")
        if request.experts_from is not None and "experts" not in worker.capabilities:
            breaks("experts", f"{call} asks {worker} for routed experts, which it is not believed to have")
        self._world.say("service", f"asks {engine.name}", request.rid[-6:], call.sample_id[-8:], len(request.input_ids))
        sample = self._life.sample(call.sample_id)
        if sample is None:
            return  # lane eval keeps no samples
        self._attempts[request.rid] = (sample.attempt, gate.epoch(call.lane))
        self._versions[request.rid] = worker.version
        self._check_prefix(sample, request)

    def _check_prefix(self, sample: Sample, request: Request) -> None:
        shadow = self._shadow(sample)
        have = sample.response_ids
        tools = have[len(shadow.ids) :]
        if tools and have[: len(shadow.ids)] == shadow.ids and all(token < FIRST_MADE for token in tools):
            shadow.ids, shadow.turn, shadow.stopped = list(have), 0, False
        elif not have and shadow.ids and self._may_restart(sample, shadow):
            shadow.reset()
        breaks = self._world.breaks
        if have != shadow.ids:
            breaks("P10", f"{sample} has {have}, it was given {shadow.ids}")
        if request.input_ids != sample.prompt_ids + have:
            breaks("P6", f"{sample} goes on from {request.input_ids}, not {sample.prompt_ids + have}")
        if shadow.stopped:
            breaks("P6", f"{sample} generates past the stop it was told of")
        self._check_asked(sample, shadow, request)
        if request.max_tokens > self._life.max_tokens - shadow.turn:
            breaks("P6", f"{sample} asks for {request.max_tokens}, it has {shadow.turn} of this turn")

    def _check_asked(self, sample: Sample, shadow: Shadow, request: Request) -> None:
        """It asks for the rows it has not got, unless its task, or its loop in this attempt, wants none."""
        self._look_declined(sample, shadow)
        wanted = len(shadow.rows) if shadow.routed else None
        if request.experts_from != wanted:
            breaks = self._world.breaks
            breaks(
                "P28" if wanted is None or request.experts_from is None else "P27",
                f"{sample} asks for routed experts from {request.experts_from}, not {wanted}",
            )

    def _look_declined(self, sample: Sample, shadow: Shadow) -> None:
        """Its loop may have said in this attempt that it wants none, or its task all along."""
        if self._life.sample(sample.sample_id) is not sample:
            return
        declined = self._world.declined.get(sample.sample_id) == (self._life.number, sample.attempt)
        if not self._life.wants_experts(sample.sample_id) or declined:
            shadow.rows, shadow.routed = [], False

    def _check_rows(self, sample: Sample, shadow: Shadow) -> None:
        wrong = problem(sample.experts, sample.prompt_ids + sample.response_ids, shadow.rows)
        self._world.require(wrong is None, "P27", f"{sample}: routed experts {sample.experts}: {wrong}")

    def _may_restart(self, sample: Sample, shadow: Shadow) -> bool:
        """A failed attempt begins again; so does a loop past its first turn, and a cut turn that is not to go on."""
        if sample.sample_id in self.redone:
            self.redone.discard(sample.sample_id)
            return True
        if any(token < FIRST_MADE for token in shadow.ids) or shadow.stopped:
            return True
        return not self._life.keeps_partials(sample.sample_id)

    def closed(self, request: Request) -> None:
        """Its connection is closed, without an answer."""
        self.open.pop(request.sample_id, None)

    def received(self, endpoint: Endpoint, engine: SimEngine, request: Request, reply: Reply) -> None:
        """Its answer has reached the service."""
        self.open.pop(request.sample_id, None)
        call = self._life.worker(endpoint).calls.get(request.rid)
        if request.experts_from is not None and call is not None:
            self._unpacking[call] = endpoint, engine, request, reply  # it has come once its routed experts have
        else:
            self._arrived(endpoint, engine, request, reply)

    def unpacked(self) -> None:
        """A call may have ended: if nobody had ended it before, its answer has come."""
        for call, (endpoint, engine, request, reply) in tuple(self._unpacking.items()):
            if self._life.worker(endpoint).calls.get(request.rid) is not call:
                del self._unpacking[call]
                if call.cancelled_for is None:
                    self._arrived(endpoint, engine, request, reply)

    def _arrived(self, endpoint: Endpoint, engine: SimEngine, request: Request, reply: Reply) -> None:
        sample = self._life.sample(request.sample_id)
        if sample is None or request.rid not in self._attempts:
            return
        attempt, epoch = self._attempts.pop(request.rid)
        if sample.attempt != attempt:
            return
        if not self._genuine(endpoint, engine, request, reply):
            if _invalid(reply, request):
                self.touched_invalid.append((sample, sample.failures))
            return
        late = epoch != self._life.parts.gate.epoch(self._lane(request))
        if request.finish == "abort" and not request.tokens and not late:
            return  # nobody asked for that abort: the worker is at fault
        if request.tokens and not _routed(request, reply):
            self.touched_invalid.append((sample, sample.failures))
            return
        shadow = self._shadow(sample)
        shadow.ids = shadow.ids + request.tokens
        if request.tokens and reply.lifted is not None and request.experts_from is not None:
            rows = len(request.input_ids) + len(request.tokens) - 1
            shadow.rows = shadow.rows[: request.experts_from]
            shadow.rows += [request.serial] * (rows - len(shadow.rows))
        shadow.turn += len(request.tokens)
        shadow.stopped = request.finish != "abort"
        shadow.late = late
        self._world.say("service", "has", request, request.finish, "late" if late else "")
        self.touched.append((sample, shadow))

    @staticmethod
    def _lane(request: Request) -> Lane:
        return "eval" if request.lane == "eval" else "train"

    def _genuine(self, endpoint: Endpoint, engine: SimEngine, request: Request, reply: Reply) -> bool:
        """Whether it is this request's own answer, by the weights the worker was let in with."""
        if reply.status != 200:
            return False
        try:
            body = orjson.loads(reply.body)
            meta = body["meta_info"]
            if meta["id"] != request.rid or body["output_ids"] != request.tokens:
                return False
        except (ValueError, KeyError, TypeError):
            return False
        worker = self._life.worker(endpoint)
        spans = meta["weight_versions"]
        known = (worker.version, self._versions.pop(request.rid, None))
        return not spans or worker.version is None or int(spans[-1]["version"]) in known

    def after_turn(self) -> None:
        """What arrived in this turn stands where it belongs."""
        for sample, shadow in self.touched:
            if sample.settled or sample.sample_id in self.redone:
                continue
            have = sample.response_ids
            if not have and shadow.turn < len(shadow.ids):
                continue  # a loop with a tool was begun again in this very turn
            if have[: len(shadow.ids)] != shadow.ids:
                self._world.breaks("P10", f"{sample} received {shadow.ids}, it has {have}")
            self._look_declined(sample, shadow)
            if sample.packed is None:
                self._check_rows(sample, shadow)
            if shadow.late and sample.status in _GOING_ON:
                self._world.breaks("P3", f"{sample} goes on with an answer that came after its epoch closed")
        self.touched.clear()
        for sample, failures in self.touched_invalid:
            counted = sample.failures > failures or sample.settled
            self._world.require(counted, "P4", f"{sample} goes on after an invalid answer, which was not counted")
        self.touched_invalid.clear()

    def completed(self, sample: Sample) -> None:
        """It has its reward: all it received is in it."""
        shadow, have = self.shadows.get(sample.sample_id), sample.response_ids
        if shadow is not None and have[: len(shadow.ids)] != shadow.ids:
            self._world.breaks("P10", f"{sample} was completed with {have}, it was given {shadow.ids}")
        if shadow is None or sample.settled:
            return
        if not shadow.routed:
            self._world.require(sample.experts is None, "P28", f"{sample} has routed experts, and wanted none")
        else:
            self._check_rows(sample, shadow)
            self._world.require(not sample.rows_missing, "P27", f"{sample} lacks {sample.rows_missing} rows")

    def failed(self, sample_id: str) -> None:
        """An attempt failed: its tokens may go."""
        self.redone.add(sample_id)

    def _shadow(self, sample: Sample) -> Shadow:
        shadow = self.shadows.get(sample.sample_id)
        if shadow is None:
            shadow = self.shadows[sample.sample_id] = Shadow()
        return shadow

    # -- control ---------------------------------------------------------------------------------------------

    def controlling(self, endpoint: Endpoint, engine: SimEngine, call: Call) -> None:
        """A control call is about to leave."""
        if call.path.startswith("/v1/loads"):
            self.crowded[engine.name] = bool(self._life.worker(endpoint).calls)
        if call.path != "/update_weights_from_disk":
            return
        worker, require = self._life.worker(endpoint), self._world.require
        ours = [r for r in self.open.values() if r.engine is engine]
        still = worker.frozen or (not worker.calls and not ours)
        require(still, "P24", f"weights move to {worker}, which runs {ours}")
        quarantine = worker.quarantine
        if worker.state is WorkerState.QUARANTINED and quarantine is not None and quarantine.kind == "residual":
            waited = self._world.now - quarantine.since >= self._life.config.pause.quarantine_s
            require(waited or engine.count() == 0, "P9", f"weights move to {worker}, which still runs {engine}")

    def control_arrives(self, endpoint: Endpoint, engine: SimEngine, call: Call) -> None:
        """A control call is at the engine."""
        if call.path == "/continue_generation" and engine.paused is not None and engine.loading and engine.running:
            worker = self._life.worker(endpoint)
            self._world.require(not worker.loading, "P24", f"{worker} goes on while weights are on their way to it")

    def abort_arrives(self, endpoint: Endpoint, engine: SimEngine, call: Call) -> None:
        """An abort is at the engine: of everything only while a pause holds, by id only what nobody waits for."""
        body: dict[str, Any] = orjson.loads(call.body or b"{}")
        worker, parts = self._life.worker(endpoint), self._life.parts
        closed = frozenset(lane for lane in LANES if not parts.gate.is_open(lane))
        if body.get("abort_all"):
            hit = [c for c in worker.calls.values() if c.lane not in closed]
            self._world.require(bool(closed), "P17", f"an abort of everything reaches {engine} while nothing is paused")
            self._world.require(not hit, "P15", f"an abort of everything reaches {engine}, which works for {hit}")
            return
        known = worker.calls.get(body["rid"])
        ok = known is None or known.lane in closed or known.cancelled_for is not None
        self._world.require(ok, "P17", f"an abort reaches {engine} for {known}, which somebody waits for")

    def worker_of(self, engine: SimEngine) -> Worker | None:
        """The service's view of an engine."""
        return next((w for w in self._life.parts.pool.workers.values() if w.endpoint.url == engine.url), None)


def _routed(request: Request, reply: Reply) -> bool:
    """Whether it came with the rows it was asked for, or may do without."""
    if request.experts_from is None:
        return True
    return may_lack(request) if reply.lifted is None else request.lie is None


def _invalid(reply: Reply, request: Request) -> bool:
    """Whether it is no answer at all, and no fault of the worker's: garbage, another's answer, or a refusal."""
    if reply.status != 200:
        return 400 <= reply.status < 500 and reply.status != 429
    try:
        return bool(orjson.loads(reply.body)["meta_info"]["id"] != request.rid)
    except (ValueError, KeyError, TypeError):
        return True
