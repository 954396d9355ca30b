"""All sessions: opened for a sample, found by id and key, ended when nobody uses them.

Invariants:

- A session is open from `open` to `close`; then its id and key are remembered for a while, so that whoever comes late
  learns that it is over. Keys are compared in constant time.
- A turn is a task of its own: the client's leaving ends it, and so does the session's end; after `close` none runs.
- Every session ends: its agent has so much time, one that lives elsewhere is heard of within `ttl_s`, one that nobody
  takes goes back to the buffer. Pauses do not count.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Final

from rollout_svc.agent import CLEANUP_S, AgentContext
from rollout_svc.config import SessionsConfig
from rollout_svc.errors import (
    Gone,
    Interrupted,
    NotFound,
    NotNow,
    SampleFailure,
    StaleAttempt,
    Unauthorized,
    WorkerFailure,
)
from rollout_svc.gate import Gate
from rollout_svc.judging import REPORTED
from rollout_svc.sample import Sample
from rollout_svc.sessions.exchange import Answer, Asked
from rollout_svc.sessions.session import Session
from rollout_svc.tasks import TaskOwner

__all__ = ["Sessions"]

_LOOK_S: Final = 0.25  # seconds between two looks at who is quiet: the times it measures are far longer
_REMEMBERED: Final = 4096  # sessions that are over: a late client comes within seconds
_ID_BYTES: Final = 12
_KEY_BYTES: Final = 32
_RETRY_S: Final = 1.0


class Sessions:
    """The sessions of a service; see the module's invariants.

    Attributes:
        address: gives where the service is reached; None: nowhere.
    """

    def __init__(self, config: SessionsConfig, *, tasks: TaskOwner, gate: Gate) -> None:
        """Make the room; it is empty.

        Args:
            config: its bounds.
            tasks: who owns turns.
            gate: says when a lane is paused.
        """
        self.address: Callable[[], str | None] = lambda: None
        self._config = config
        self._tasks = tasks
        self._gate = gate
        self._open: dict[str, Session] = {}
        self._by_sample: dict[str, Session] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        self._turning: dict[str, set[asyncio.Task[Answer]]] = {}
        self._room = asyncio.Semaphore(config.max)
        self._offers: defaultdict[str, deque[Session]] = defaultdict(deque)
        self._askers: defaultdict[str, deque[asyncio.Future[Session]]] = defaultdict(deque)
        self._watching: asyncio.Task[None] | None = None
        self._counts = {"opened": 0, "turns": 0, "expired": 0, "cancelled_turns": 0}

    def __repr__(self) -> str:
        return f"<Sessions {len(self._open)} of {self._config.max}>"

    # -- opening and ending ----------------------------------------------------------------------------------

    async def open(
        self, sample: Sample, context: AgentContext, *, timeout_s: float | None = None, max_turns: int | None = None
    ) -> Session:
        """Open a session for a sample; what is left of an earlier try is forgotten.

        Raises:
            WorkerFailure: there was no room in `ttl_s`; the sample goes back and nothing is counted against it.
        """
        try:
            async with asyncio.timeout(self._config.ttl_s):
                await self._room.acquire()
        except TimeoutError:
            message = f"sessions.max is {self._config.max}, and none of them ended in {self._config.ttl_s:g} s"
            raise WorkerFailure("no_room", message) from None
        try:
            return self._begin(sample, context, timeout_s, max_turns)
        except BaseException:
            self._room.release()
            raise

    def _begin(self, sample: Sample, context: AgentContext, timeout_s: float | None, max_turns: int | None) -> Session:
        context.drop_turn()
        sample.meta = {key: value for key, value in sample.meta.items() if key != REPORTED}
        session = Session(
            secrets.token_hex(_ID_BYTES),
            secrets.token_urlsafe(_KEY_BYTES),
            sample,
            context,
            form=self._config.tool_format,
            hold_s=self._config.hold_s,
            timeout_s=timeout_s,
            max_turns=max_turns,
        )
        self._open[session.session_id] = session
        self._by_sample[sample.sample_id] = session
        self._turning[session.session_id] = set()
        self._counts["opened"] += 1
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.spawn("sessions", self._watch())
        return session

    async def close(self, session: Session) -> None:
        """End a session for good; returns when no turn of it runs any more. Idempotent."""
        session.end()
        if self._open.pop(session.session_id, None) is not None:
            if self._by_sample.get(session.sample.sample_id) is session:
                del self._by_sample[session.sample.sample_id]
            self._over[session.session_id] = session.key
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
            self._room.release()
        turning = self._turning.pop(session.session_id, set())
        for turn in turning:
            turn.cancel()
        if turning:
            await asyncio.wait(turning, timeout=CLEANUP_S)

    def base_url(self, session: Session) -> str:
        """Where a session is reached: its API for OpenAI's clients is below `/v1`."""
        address = self.address()
        if address is None:
            raise SampleFailure("agent_error", "the service has no address: its HTTP is not served")
        return f"{address.rstrip('/')}/sessions/{session.session_id}"

    # -- finding ---------------------------------------------------------------------------------------------

    def find(self, session_id: str, key: str | None) -> Session:
        """Find an open session.

        Args:
            session_id: in the address.
            key: that the request carries; None: it carries the service's own token.

        Raises:
            NotFound: there is none, and none is remembered.
            Unauthorized: the key is not its.
            Gone: it is over.
        """
        session = self._open.get(session_id)
        known = self._over.get(session_id) if session is None else session.key
        if known is None:
            raise NotFound("no such session")
        if key is not None and not secrets.compare_digest(key.encode("utf-8", "surrogateescape"), known.encode()):
            raise Unauthorized("this session needs its own key")
        if session is None or session.over:
            raise Gone("this session is over")
        return session

    def of_sample(self, sample_id: str) -> Session | None:
        """The open session of a sample."""
        return self._by_sample.get(sample_id)

    def turn_of(self, session: Session) -> asyncio.Task[Answer] | None:
        """The turn of a session that was asked for first, of those under way."""
        return next(iter(self._turning.get(session.session_id, ())), None)

    # -- agents that live elsewhere --------------------------------------------------------------------------

    def offer(self, session: Session) -> None:
        """Have a session wait for an agent that lives elsewhere."""
        session.offered = session.elsewhere = True
        task = session.prompt.task
        askers = self._askers[task]
        while askers:
            asker = askers.popleft()
            if not asker.done():
                asker.set_result(session)
                return
        self._offers[task].append(session)

    async def claim(self, task: str, wait_s: float) -> Session:
        """Take the session that has waited longest for an agent of a task.

        Raises:
            NotNow: `no_sample`: none came in `wait_s`.
        """
        offers = self._offers[task]
        while offers:
            if not (session := offers.popleft()).over:
                return self._claimed(session)
        asker: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._askers[task].append(asker)
        try:
            await asyncio.wait({asker}, timeout=wait_s)
        except asyncio.CancelledError:
            if asker.done() and not asker.result().over:
                self.offer(asker.result())
            raise
        finally:
            if not asker.done():
                self._askers[task].remove(asker)
                asker.cancel()
        if asker.cancelled() or asker.result().over:
            message = f"no sample of task {task!r} waits for an agent"
            raise NotNow("no_sample", message, retry_after_s=_RETRY_S)
        return self._claimed(asker.result())

    @staticmethod
    def _claimed(session: Session) -> Session:
        session.offered = False
        session.quiet_s = 0.0
        return session

    # -- turns -----------------------------------------------------------------------------------------------

    def begin(self, session: Session, asked: Asked) -> asyncio.Task[Answer]:
        """Begin a turn; its `outcome` is to be asked for. Whoever waits for it cancels it on leaving.

        Raises:
            Gone: the session has had all its turns, and is over.
        """
        session.check_turns()
        turn: asyncio.Task[Answer] = self._tasks.spawn(
            f"turn:{session.session_id}", self._turn(session, asked), handled=True
        )
        turning = self._turning.setdefault(session.session_id, set())
        turning.add(turn)
        turn.add_done_callback(turning.discard)
        return turn

    async def _turn(self, session: Session, asked: Asked) -> Answer:
        try:
            answer = await session.turn(asked)
        except (Interrupted, WorkerFailure, StaleAttempt) as error:
            session.end(None if isinstance(error, StaleAttempt) else error)
            raise Gone("this session is over: its sample went back, another session will be opened for it") from error
        except asyncio.CancelledError:
            self._counts["cancelled_turns"] += 1
            raise
        self._counts["turns"] += 1
        return answer

    @staticmethod
    async def leave(turn: asyncio.Task[Answer]) -> None:
        """Give up a turn that nobody waits for."""
        turn.cancel()
        await asyncio.wait({turn}, timeout=CLEANUP_S)

    @staticmethod
    def outcome(turn: asyncio.Task[Answer]) -> Answer:
        """What a turn that is done came to; raises what it raised, and Gone where its session ended it."""
        if turn.cancelled():
            raise Gone("this session is over")
        return turn.result()

    # -- watching --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """End what nobody uses; lives while a session is open."""
        loop = asyncio.get_running_loop()
        last = loop.time()
        while self._open:
            await asyncio.sleep(_LOOK_S)
            now = loop.time()
            for session in list(self._open.values()):
                if not session.ended.done() and self._gate.is_open(session.lane):
                    self._look(session, now - last)
            last = now

    def _look(self, session: Session, passed_s: float) -> None:
        ttl_s, sid = self._config.ttl_s, session.session_id
        session.quiet_s = 0.0 if self._turning.get(sid) else session.quiet_s + passed_s
        if session.offered:
            if session.quiet_s >= ttl_s:
                self._expire(session, WorkerFailure("no_agent", f"no agent took its session in {ttl_s:g} s"))
            return
        session.taken_s += passed_s
        if session.timeout_s is not None and session.taken_s >= session.timeout_s:
            message = f"its agent took longer than {session.timeout_s:g} s, with {session.turns} turns"
            self._expire(session, SampleFailure("agent_timeout", message))
        elif session.elsewhere and session.quiet_s >= ttl_s:
            message = f"nothing was heard of its agent for {ttl_s:g} s, after {session.turns} turns"
            self._expire(session, SampleFailure("session_idle", message))

    def _expire(self, session: Session, failure: SampleFailure | WorkerFailure) -> None:
        self._counts["expired"] += 1
        session.end(failure)

    def describe(self, session: Session) -> dict[str, Any]:
        """What an agent needs to know of its session."""
        prompt = session.prompt
        told = {
            "session_id": session.session_id,
            "base_url": f"{self.base_url(session)}/v1",
            "api_key": session.key,
            "sample_id": session.sample.sample_id,
            "prompt": prompt.input_ids if prompt.content is None else prompt.content,
        }
        return told if prompt.ground_truth is None else told | {"ground_truth": prompt.ground_truth}

    def as_json(self) -> dict[str, Any]:
        """The record of `status.sessions`."""
        return {
            "open": len(self._open),
            "max": self._config.max,
            "waiting_for_agent": sum(session.offered for session in self._open.values()),
            "turns_under_way": sum(map(len, self._turning.values())),
            **self._counts,
        }
