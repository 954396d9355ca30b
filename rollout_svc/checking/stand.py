"""One sample of a check, with all that an agent loop is given, and an eye on what it does with it.

Invariants:

- The context is the service's own; only the engine behind it is the check's.
- Whatever it raised for the loop is noted, with the line that asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rollout_svc.agent import AgentContext, OnPause, Turn, Words, Work
from rollout_svc.checking import places
from rollout_svc.checking.speaker import Cut, Speaker
from rollout_svc.checking.stepping import Runaway
from rollout_svc.checking.tongue import Tongue
from rollout_svc.config import SamplingConfig
from rollout_svc.errors import Interrupted, SampleFailure, StaleAttempt, WorkerFailure
from rollout_svc.gate import Gate
from rollout_svc.group import Group
from rollout_svc.judging import ProcessRunner
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import SampleStatus
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import TaskOwner
from rollout_svc.tokens import TextCodec

__all__ = ["LANE", "Inline", "Manners", "Noted", "Stand"]

LANE: Final = "train"
_MOST_CALLS: Final = 500  # of `generate` in one run: a loop that asks more often never ends
_PASSED_ON: Final = (Interrupted, StaleAttempt, WorkerFailure, SampleFailure)

R = TypeVar("R")


class Inline(Executor):
    """Does what it is given at once: the clock of a check does not pass while a thread works."""

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Do it."""
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future


@dataclass(frozen=True, slots=True)
class Noted:
    """What the context raised for the loop, and where that had asked."""

    error: BaseException
    where: str


@dataclass(frozen=True, slots=True)
class Manners:
    """How the engine of one run behaves, and the pause; see `Speaker`."""

    texts: Sequence[str]
    on_pause: OnPause
    one_turn: bool
    cut: Cut = "partial"
    failure: tuple[int, Exception] | None = None
    latency_s: float = 0.1


class Stand:
    """One sample and its context.

    Attributes:
        noted: what was raised for the loop, in order.
        wrong: what it did wrong itself: rule, what happened, where.
    """

    def __init__(self, prompt: Prompt, manners: Manners, processes: ProcessRunner | None, number: int = 0) -> None:
        group = Group(group_id=f"check{number}", prompt=prompt, size=1, lane=LANE, ledger=Ledger())
        self.sample = group.samples[0]
        self.gate = Gate()
        self.tasks = TaskOwner()
        self.noted: list[Noted] = []
        self.wrong: list[tuple[str, str, str]] = []
        signals = GateSignals(self.gate)
        tongue = Tongue()
        self.tongue = tongue
        self.context = _Watched(
            self,
            sample=self.sample,
            attempt=self.sample.hand_out(),
            prompt=prompt,
            lane=LANE,
            sampling=SamplingConfig(),
            on_pause=manners.on_pause,
            one_turn=manners.one_turn,
            engines=Speaker(
                manners.texts,
                self.gate,
                signals,
                cut=manners.cut,
                failure=manners.failure,
                latency_s=manners.latency_s,
            ),
            signals=signals,
            on_parked=lambda: None,
            words=Words(TextCodec(tongue, Inline())),
            work=Work(self.sample.sample_id, self.tasks, processes),
        )

    def take_back(self) -> None:
        """Take the sample from its loop, as a pause does at its end."""
        sample = self.sample
        if sample.status is SampleStatus.GENERATING:
            sample.transition(sample.attempt, SampleStatus.ABORTED, reason="hand_back", resume_at="generate")
            sample.revoke()

    def compare(self, ids: Sequence[int]) -> None:
        """Hold what the loop gives as prefix against what was said so far."""
        known = self.sample.prefix_ids()
        if list(ids) == known:
            return
        at = next((k for k, (one, other) in enumerate(zip(ids, known, strict=False)) if one != other), None)
        if at is None and len(ids) < len(known):
            happened = f"turn {self.sample.turn + 1}: it left out the last {len(known) - len(ids)} of {len(known)} ids"
        elif at is None:
            happened = (
                f"turn {self.sample.turn + 1}: it gave {len(ids) - len(known)} ids more than were generated and "
                "appended: what it says itself it has to ctx.append"
            )
        else:
            happened = f"turn {self.sample.turn + 1}: its ids differ from what was said at place {at} of {len(known)}"
            if self.tongue.decode(ids).startswith(self.tongue.decode(known)):
                happened += "; the text is the same: it encoded again what the model had made"
        self.wrong.append(("ids", happened, places.of_here()))


class _Watched(AgentContext):
    """The service's context, and somebody who looks on."""

    __slots__ = ("_asked", "_stand")

    def __init__(self, stand: Stand, **parts: Any) -> None:
        super().__init__(**parts)
        self._stand = stand
        self._asked = 0

    async def generate(self, ids: list[int] | None = None, sampling: SamplingConfig | None = None) -> Turn:
        """Generate one turn; see `AgentContext`."""
        self._asked += 1
        where = places.of_here()
        if self._asked > _MOST_CALLS:
            self._stand.wrong.append(("ends", f"it called ctx.generate {self._asked} times", where))
            raise Runaway("it asks for ever")
        if self.calling:
            self._stand.wrong.append(("ids", "it called ctx.generate while another call of it was under way", where))
        elif ids is not None and self.cut is None and not self.over:
            self._stand.compare(ids)
        try:
            return await super().generate(ids, sampling)
        except _PASSED_ON as error:
            self._stand.noted.append(Noted(error, where))
            raise

    def append(self, ids: list[int]) -> None:
        """Add tokens that the model did not make; see `AgentContext`."""
        try:
            super().append(ids)
        except StaleAttempt as error:
            self._stand.noted.append(Noted(error, places.of_here()))
            raise
