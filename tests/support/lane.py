"""A client of lane `eval`: it asks the pool for whole answers, as evaluations will, and notes what became of each.

- One call is one sample of its own; nothing is judged, nothing is kept in a buffer, and the ledger is the lane's own.
- A call that is interrupted waits for its lane to open and asks again from its own tokens.
"""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_svc.agent import AgentContext, Turn
from rollout_svc.assembly import Parts
from rollout_svc.config import SamplingConfig
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.signals import GateSignals

__all__ = ["Evaluation"]


class Evaluation:
    """Asks in lane `eval`: `ask(3)` starts three, `answers` are the turns that came."""

    def __init__(self, parts: Parts, sampling: SamplingConfig | None = None) -> None:
        self.ledger = Ledger()
        self.answers: list[Turn] = []
        self.errors: list[Exception] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._parts = parts
        self._signals = GateSignals(parts.gate)
        self._sampling = sampling or SamplingConfig(max_tokens=16)

    def ask(self, count: int = 1) -> None:
        """Start that many."""
        loop = asyncio.get_running_loop()
        self.tasks += [loop.create_task(self._one(len(self.tasks) + n)) for n in range(count)]

    async def done(self) -> list[Turn]:
        """Wait until all have answered."""
        await asyncio.gather(*self.tasks)
        return self.answers

    async def _one(self, number: int) -> None:
        prompt = Prompt(f"e{number}", "evaluation", [90, number], None, None, {}, {})
        group: Any = Group(group_id=f"eval-{number}", prompt=prompt, size=1, lane="eval", ledger=self.ledger)
        [sample] = group.samples
        context = AgentContext(
            sample=sample,
            attempt=sample.hand_out(),
            prompt=prompt,
            lane="eval",
            sampling=self._sampling,
            on_pause="park",
            one_turn=True,
            engines=self._parts.pool,
            signals=self._signals,
            on_parked=lambda: None,
        )
        try:
            self.answers.append(await context.generate(prompt.input_ids))
        except Exception as error:  # noqa: BLE001 - noted for the test
            self.errors.append(error)
