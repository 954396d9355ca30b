"""An engine caller written by hand: it answers from a script, and remembers what it was asked."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from rollout_svc.agent import AgentContext, OnPause, Turn, Words, Work
from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Completion
from rollout_svc.gate import Gate, Lane
from rollout_svc.judging import ProcessRunner
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample
from rollout_svc.segment import FinishReason, VersionSpan
from rollout_svc.signals import GateSignals
from rollout_svc.tasks import TaskOwner
from rollout_svc.tokens import ByteTokenizer, TextCodec
from tests.support.groups import make_prompt, make_sample

__all__ = ["Asked", "Caller", "Table", "answer"]


class Inline(Executor):
    """Does what it is given at once: virtual time does not pass while a thread works."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - the caller's
            future.set_exception(error)
        return future


@dataclass(frozen=True)
class Asked:
    """What one call was for."""

    input_ids: list[int]
    max_tokens: int
    sampling: SamplingConfig
    experts: bool = False


Step = Completion | Exception | Callable[[], Awaitable[Completion]]


class Caller:
    """Answers each call with the next step of its script: a completion, an error, or whatever a function does."""

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.asked: list[Asked] = []

    async def generate(
        self,
        sample: Sample,
        prompt: Prompt,
        lane: Lane,
        input_ids: list[int],
        max_tokens: int,
        sampling: SamplingConfig,
        *,
        experts: bool = False,
    ) -> Completion:
        self.asked.append(Asked(list(input_ids), max_tokens, sampling, experts))
        step = self.script.pop(0)
        await asyncio.sleep(0)
        if isinstance(step, Exception):
            raise step
        return step if isinstance(step, Completion) else await step()


def answer(ids: list[int], finish: FinishReason = "stop", *, late: bool = False, version: int = 0) -> Completion:
    """Make a completion of one version."""
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    return Completion(list(ids), [-1.0] * len(ids), finish, finish, spans, late=late, worker="w")


class Table:
    """One sample, a gate, and the contexts of its attempts."""

    def __init__(self, *script: Step, max_tokens: int = 10, on_pause: OnPause = "abort", experts: bool = False) -> None:
        self.ledger = Ledger()
        self.sample = make_sample(self.ledger)
        self.gate = Gate()
        self.signals = GateSignals(self.gate)
        self.caller = Caller(*script)
        self.sampling = SamplingConfig(max_tokens=max_tokens)
        self.on_pause = on_pause
        self.experts = experts
        self.parked = 0
        self.prompt = make_prompt()
        self.tokenizer = ByteTokenizer()
        self.tasks = TaskOwner()
        self.processes: ProcessRunner | None = None

    def context(self) -> AgentContext:
        """Hand the sample out, and make the context of that attempt."""
        return AgentContext(
            sample=self.sample,
            attempt=self.sample.hand_out(),
            prompt=self.prompt,
            lane="train",
            sampling=self.sampling,
            on_pause=self.on_pause,
            one_turn=True,
            engines=self.caller,
            signals=self.signals,
            on_parked=self._parked,
            words=Words(TextCodec(self.tokenizer, Inline())),
            work=Work(self.sample.sample_id, self.tasks, self.processes),
            experts=self.experts,
        )

    def _parked(self) -> None:
        self.parked += 1

    def hand_back(self) -> None:
        """Take the sample from its task, as a pause does."""
        sample = self.sample
        sample.transition(sample.attempt, sample.status.ABORTED, reason="hand_back", resume_at="generate")
        sample.revoke()

    def asks(self) -> list[tuple[list[int], int]]:
        """What the engine was asked for: input and budget of each call."""
        return [(asked.input_ids, asked.max_tokens) for asked in self.caller.asked]

    def withdraw(self) -> None:
        """Close the lane's gate, running requests included."""
        self.gate.close(["train"], "abort")

    def then(self, what: Callable[[], Any], step: Completion) -> Callable[[], Awaitable[Completion]]:
        """Do something while the engine works on its answer."""

        async def run() -> Completion:
            what()
            return step

        return run


def told(turn: Turn) -> tuple[list[int], list[float], str]:
    """A turn as its three parts."""
    return turn.ids, turn.logprobs, turn.finish_reason
