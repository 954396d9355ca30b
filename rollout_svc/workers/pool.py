"""The fleet, and the one way to make an engine call.

Invariants:

- The gate is read and the slot is claimed in one step (`slots.py`): nothing starts after the gate closed.
- At most one live request per sample: before a retry the old one has failed, been answered, or been aborted with
  its connection closed. Every call has a wire id of its own.
- Worker failures cost the sample nothing, except poison: the third failure on workers that answered others since.
- A back-off sleep ends when the lane's gate closes.
- Routed experts are part of the answer they belong to; those of an answer that does not count are released here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Final

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Completion, GenerateRequest, StreamReader, Transport, WrittenIds
from rollout_svc.errors import Interrupted, NoWorker, RolloutError, SampleFailure, WorkerFailure
from rollout_svc.events import EventBus, RequestAborted, RequestFinished, RequestRetried, WorkerChanged
from rollout_svc.gate import LANES, Gate, Lane
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.segment import VersionSpan
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import TaskOwner
from rollout_svc.workers.aborting import Aborting
from rollout_svc.workers.answers import refuse_other_weights, refuse_own_abort, refuse_what_was_not_asked
from rollout_svc.workers.call import CallEnded, EngineCall
from rollout_svc.workers.control import CONTROL_TIMEOUT_S, Control
from rollout_svc.workers.experts import ExpertsDesk, may_lack, release
from rollout_svc.workers.line import Line, Wait
from rollout_svc.workers.overdue import Overdue
from rollout_svc.workers.poison import refuse_poison
from rollout_svc.workers.retry import retry
from rollout_svc.workers.routing import Router
from rollout_svc.workers.slots import Slots
from rollout_svc.workers.worker import Worker, WorkerState

__all__ = ["WorkerPool"]

_OK: Final = 200
_UNANSWERED: Final = frozenset({"request_timeout", "dropped_by_router"})  # these say nothing of the engine


class WorkerPool:
    """All workers, their slots, and the calls they run."""

    def __init__(
        self,
        *,
        gate: Gate,
        signals: GateSignals,
        transport: Transport,
        control: Control,
        tasks: TaskOwner,
        bus: EventBus,
        rng: Random,
        new_id: Callable[[], str],
        request_timeout_s: float,
        router: Router,
        experts: ExpertsDesk,
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self.answered = 0
        self.in_flight: dict[Lane, int] = dict.fromkeys(LANES, 0)
        self._gate = gate
        self._signals = signals
        self._transport = transport
        self._aborting = Aborting(control, tasks)
        self._bus = bus
        self._rng = rng
        self._new_id = new_id
        self._request_timeout_s = request_timeout_s
        self._experts = experts
        self._slots = Slots(workers=self.workers, gate=gate, router=router, patience_s=request_timeout_s)
        self._listeners: list[Callable[[], None]] = []
        self._overdue = Overdue(self.workers, request_timeout_s)
        self.on_fleet: Callable[[], None] = lambda: None
        self.on_answer: Callable[[Worker, EngineCall, bool], None] | None = None
        self.on_end: Callable[[Worker, EngineCall], None] | None = None

    # -- the fleet -------------------------------------------------------------------------------------------

    def add(self, worker: Worker) -> None:
        """Enter a worker; it gets traffic once it is ACTIVE."""
        self.workers[worker.worker_id] = worker
        self._slots.count(worker)
        self.fleet_changed()

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        self.workers.pop(worker_id, None)
        self._slots.gone(worker_id)
        self.fleet_changed()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener()` whenever a slot, a worker or a state changed; returns the function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def close(self) -> None:
        """Stop the timer; idempotent."""
        self._overdue.close()

    def changed(self, worker: Worker | None = None) -> None:
        """Wake those who wait for a slot, as far as there are slots, and the listeners.

        Args:
            worker: the only one that may have more slots than it had, or less to do; None: any may.
        """
        self._slots.changed(worker)
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def state_changed(self, worker: Worker, before: WorkerState, after: WorkerState, reason: str) -> None:
        """Tell the world and the waiting; given to every worker as its listener."""
        self._bus.emit(WorkerChanged(worker.worker_id, str(before), str(after), reason, worker.incarnation))
        self._slots.count(worker)
        self.fleet_changed(worker)

    def thawed(self, worker: Worker) -> None:
        """A frozen worker goes on: its calls' time limits count again, and it has room."""
        self._overdue.look_again(worker)
        self.changed(worker)

    def fleet_changed(self, worker: Worker | None = None) -> None:
        """A worker came, went, or changed state or limit: this one alone, or any."""
        self.changed(worker)
        self.on_fleet()

    @property
    def in_traffic(self) -> int:
        """How many workers get traffic; asked with every group and every request."""
        return self._slots.in_traffic

    @property
    def line(self) -> Line:
        """Who waits for a slot, or between two tries."""
        return self._slots.line

    @property
    def active(self) -> list[Worker]:
        """Those workers."""
        return [worker for worker in self.workers.values() if worker.state is WorkerState.ACTIVE]

    # -- one call --------------------------------------------------------------------------------------------

    async def generate(
        self,
        sample: Sample,
        prompt: Prompt,
        lane: Lane,
        input_ids: list[int] | WrittenIds,
        max_tokens: int,
        sampling: SamplingConfig,
        *,
        experts: bool = False,
    ) -> Completion:
        """Make an engine call, retried on other workers as `agent.EngineCaller` promises."""
        rows = self._experts.rows_held(sample, lane, asked=experts and sampling.return_routed_experts)
        # One seed for a whole group would draw the same answer k times: each member gets its own from it.
        seed = None if sampling.seed is None else sampling.seed + sample.index
        written = input_ids if isinstance(input_ids, WrittenIds) else WrittenIds.of(input_ids)
        prefix, tokens = written.json, written.length + max_tokens
        del input_ids, written  # thousands of lists of ids that only wait to be freed would hold up a pause's answers

        def request() -> GenerateRequest:
            extra, most = prompt.engine_extra, self._experts.max_bytes
            return GenerateRequest(self._new_id(), prefix, max_tokens, sampling, seed, extra, rows, most)

        try:
            return await self._try(sample, lane, request(), tokens, frozenset())
        except NoWorker:
            raise
        except WorkerFailure as failure:
            return await self._retry(sample, lane, request, tokens, failure)

    async def _retry(
        self, sample: Sample, lane: Lane, request: Callable[[], GenerateRequest], tokens: int, first: WorkerFailure
    ) -> Completion:
        """Try again elsewhere; the happy path never builds any of this."""

        async def sleep(seconds: float) -> None:
            self.line.waits[sample.sample_id] = Wait("retrying", asyncio.get_running_loop().time())
            try:
                open_still = await self._signals.sleep_while_open(lane, seconds)
            finally:
                self.line.waits.pop(sample.sample_id, None)
            if not open_still:
                raise Interrupted("the gate closed during a retry's back-off")

        async def again(last: WorkerFailure) -> Completion:
            refuse_poison(self.workers, sample, last)
            avoid = frozenset(worker_id for worker_id, _ in sample.worker_failures[-1:])
            return await self._try(sample, lane, request(), tokens, avoid)

        def announce(failure: WorkerFailure, calls: int, sleep_s: float) -> None:
            last = sample.worker_failures[-1][0] if sample.worker_failures else None
            self._bus.emit(RequestRetried(sample.sample_id, last, failure.kind, calls, sleep_s))

        return await retry(first, again, sleep=sleep, rng=self._rng, announce=announce)

    async def _try(
        self, sample: Sample, lane: Lane, request: GenerateRequest, tokens: int, avoid: frozenset[str]
    ) -> Completion:
        loop = asyncio.get_running_loop()
        worker = await self._slots.claim(sample, lane, avoid, loop.time() + self._request_timeout_s)
        epoch = self._gate.epoch(lane)
        call = EngineCall(request.request_id, sample.sample_id, lane, epoch, loop.time(), worker.version)
        worker.calls[call.request_id] = call
        worker.tokens += tokens
        worker.in_flight[lane] += 1
        self.in_flight[lane] += 1
        reader = call.reader = worker.dialect.reader() if worker.stream else None
        call.max_tokens = request.max_tokens
        try:
            completion = await self._exchange(worker, call, request, reader, sample, tokens - request.max_tokens)
            self._check(worker, call, completion)
        except WorkerFailure as failure:
            self._worker_failed(worker, call, sample, failure)
            partial = self._partial(worker, call, request, reader)
            if partial is None:
                raise
            if partial.finish_reason == "abort":  # what it brought is no progress if it breaks every worker
                refuse_poison(self.workers, sample, failure)
            return partial
        except Interrupted:
            partial = self._partial(worker, call, request, reader)
            if partial is None:
                raise
            return partial
        except SampleFailure as failure:
            if failure.reason not in _UNANSWERED:
                self._works(worker)  # it answered: what is wrong is the answer
            raise
        except asyncio.CancelledError:
            self._aborting.at_engine(worker, call, "client")
            raise
        finally:
            del worker.calls[call.request_id]
            worker.tokens -= tokens
            worker.in_flight[lane] -= 1
            self.in_flight[lane] -= 1
            if worker.state is WorkerState.DRAINING:
                worker.attention.set()
            if self.on_end is not None:
                self.on_end(worker, call)
            self._slots.given_back(worker)
            self._tell()
        if completion.finish_reason != "abort":
            sample.worker_failures.clear()  # progress: what failed before says nothing of what comes
        self._answered(worker, call, completion)
        return completion

    async def _exchange(
        self,
        worker: Worker,
        call: EngineCall,
        request: GenerateRequest,
        reader: StreamReader | None,
        sample: Sample,
        sent: int,
    ) -> Completion:
        """Send and receive under the call's own scope, which anyone may end; `sent`: tokens of the prefix."""
        self._overdue.watch()
        dialect = worker.dialect

        def answer() -> Completion:
            streamed = reader is not None and not reply.body and reply.status == _OK
            completion = reader.completion() if reader is not None and streamed else dialect.parse_generate(reply)
            refuse_what_was_not_asked(request, completion)
            call.answer = completion if request.experts_from is not None and completion.ids else None
            return completion

        try:
            with call:
                if reader is None:
                    reply = await self._transport.data(worker.endpoint, dialect.generate(request))
                else:
                    built = dialect.generate(request, stream=True)
                    reply = await self._transport.stream(worker.endpoint, built, reader)
                if request.experts_from is None:
                    return answer()
                raw = dialect.experts_of(reply.lifted, request)
                return await self._experts.read(worker, sample, request, sent, raw, answer)
        except CallEnded:
            reason = call.cancelled_for
            self._bus.emit(RequestAborted(call.sample_id, worker.worker_id, str(reason)))
            if reason == "timeout":
                self._aborting.at_engine(worker, call, "timeout")
                message = f"{worker.worker_id}: no answer in request_timeout_s = {self._request_timeout_s:g} s"
                raise SampleFailure("request_timeout", message) from None
            if reason == "worker_dead":
                raise WorkerFailure("worker_dead", f"{worker.worker_id}: stopped answering", accepted=True) from None
            raise Interrupted(f"{call.sample_id}: the call was cancelled ({reason})") from None

    def _check(self, worker: Worker, call: EngineCall, completion: Completion) -> None:
        """Check an answer against what is known of whom it comes from; one that is refused is let go of."""
        if not completion.spans and completion.ids:
            # The engine reports no version: it is that of the dispatch, unless weights came in between.
            version = call.version if call.version == worker.version else None
            completion.spans = (VersionSpan(version, 0, len(completion.ids), confirmed=False),)
        completion.late = call.epoch != self._gate.epoch(call.lane)
        try:
            refuse_other_weights(worker, call, completion)
            refuse_own_abort(worker, call, completion)
        except RolloutError:
            release(completion, f"{call.sample_id}: an answer that was refused")
            raise
        completion.worker = worker.worker_id
        if worker.profile is not None:
            completion.logprobs_mode = worker.profile.logprobs

    def _partial(
        self, worker: Worker, call: EngineCall, request: GenerateRequest, reader: StreamReader | None
    ) -> Completion | None:
        """What a call had brought when it ended early: an abort, which goes on elsewhere with its prefix.

        Of a stream all that came; of an answer whose routed experts were still being read, its tokens. Where only the
        end of the stream is missing it is the answer, for nothing may be generated past a stop: one whose routed
        experts were to come with that end has not come.
        """
        partial = call.answer if reader is None else reader.partial()
        if partial is None or (request.experts_from is not None and not may_lack(partial, request)):
            return None
        call.aborts += 1  # nobody has to have asked the engine for it
        try:
            refuse_what_was_not_asked(request, partial)
            self._check(worker, call, partial)
        except (SampleFailure, WorkerFailure):
            return None
        return partial

    def _answered(self, worker: Worker, call: EngineCall, completion: Completion) -> None:
        worker.answered += 1
        self.answered += 1
        self._works(worker)
        if self.on_answer is not None:
            self.on_answer(worker, call, completion.late and completion.finish_reason != "abort")
        self._bus.tell(
            RequestFinished,
            call.sample_id,
            worker.worker_id,
            call.lane,
            asyncio.get_running_loop().time() - call.since,
            len(completion.ids),
            completion.finish_reason,
            completion.late,
        )

    def _works(self, worker: Worker) -> None:
        """It answered; one that was only tried has room for more from now on."""
        tried = worker.breaker.state != "closed"
        worker.breaker.succeeded()
        if tried:
            self.changed(worker)

    def _worker_failed(self, worker: Worker, call: EngineCall, sample: Sample, failure: WorkerFailure) -> None:
        sample.worker_failures.append((worker.worker_id, worker.answered))
        if failure.accepted and failure.kind != "connection":
            self._aborting.at_engine(worker, call, "worker_dead")
        # By group: the samples of one poison prompt are one witness, however many they are.
        opened = worker.breaker.failed(asyncio.get_running_loop().time(), sample.group_id, hard=failure.hard)
        if opened and worker.state is WorkerState.ACTIVE:
            worker.become(WorkerState.RECOVERING, str(failure))
        elif failure.kind == "connection":
            worker.doubt()

    # -- control ---------------------------------------------------------------------------------------------

    async def abort(self, worker: Worker, request_ids: list[str] | None, timeout_s: float = CONTROL_TIMEOUT_S) -> bool:
        """Send one abort on the control lane; see `Aborting.abort`."""
        return await self._aborting.abort(worker, request_ids, timeout_s)
