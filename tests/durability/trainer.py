"""A small trainer that writes down, outside of the service, what it was answered; and repeats what was not.

- It makes one call at a time. A call that is cut off by a kill is kept as unsure, and repeated in the next life.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from rollout_svc.errors import Conflict, NotNow
from rollout_svc.rpc.client import RolloutClient
from tests.durability.books import Books
from tests.durability.engine import answer_of, prompt_of
from tests.durability.site import PUSHED_TOKENS

__all__ = ["Trainer"]

_FIRST_PUSHED: Final = 5000  # numbers of pushed prompts: none of a line
_TAKE_S: Final = 0.3  # patience of a take
_HELD: Final = 3  # batches that are lent at once, at most


class Trainer:
    """Takes, acknowledges, pushes, pauses.

    Args:
        books: what it writes down.
        rng: what it does next.
        most_pushed: prompts it pushes in all.
    """

    def __init__(self, books: Books, rng: Random, most_pushed: int) -> None:
        self.books = books
        self.step = 0
        self.pushes = 0
        self._rng = rng
        self._most_pushed = most_pushed
        self._client = RolloutClient("http://127.0.0.1:1")
        self._unsure_acks: dict[str, None] = {}
        self._unsure_pushes: list[dict[str, list[int]]] = []

    async def meet(self, url: str) -> None:
        """Talk to the service's next life."""
        await self._client.close()
        self._client = RolloutClient(url)

    async def close(self) -> None:
        """Close the connections; idempotent."""
        await self._client.close()

    def go_back(self, books: Books, step: int) -> None:
        """Go on from an earlier moment, as a trainer does that starts from its checkpoint."""
        self.books, self.step = books, step
        self._unsure_acks.clear()
        self._unsure_pushes.clear()
        self.pushes = sum(prompt_id.startswith("pushed") for prompt_id in books.answers)

    # -- calls -----------------------------------------------------------------------------------------------

    async def take(self, groups: int, ack: tuple[str, ...] = ()) -> None:
        """Take the next step's batch, or the one that an unanswered take has lent already."""
        self._unsure_acks |= dict.fromkeys(ack)
        asked_at = time.time()
        batch = await self._client.take_batch(self.step, groups, _TAKE_S, ack=list(ack))
        late = batch.get("ack_expired", ())
        for batch_id in ack:
            self._acked(batch_id, refused=batch_id in late)
        self.books.took(batch, asked_at, time.time())
        self.step += 1

    async def take_again(self, step: int) -> None:
        """Ask once more for a batch that is lent: it must be the same, unless its lease has ended."""
        lent = self.books.lent[step]
        asked_at = time.time()
        try:
            batch = await self._client.take_batch(step, len(lent.groups), 0.0, ack=None)
        except NotNow:
            self.books.refused(lent.batch_id, time.time())
        else:
            self.books.took(batch, asked_at, time.time())

    async def ack(self, batch_id: str) -> None:
        """Acknowledge a batch."""
        self._unsure_acks[batch_id] = None
        try:
            await self._client.ack(batch_id)
        except Conflict:
            self._acked(batch_id, refused=True)
        else:
            self._acked(batch_id, refused=False)

    def _acked(self, batch_id: str, *, refused: bool) -> None:
        del self._unsure_acks[batch_id]
        if refused:
            self.books.refused(batch_id, time.time())
        else:
            self.books.acked(batch_id)

    async def push(self, count: int) -> None:
        """Push new prompts."""
        numbers = range(_FIRST_PUSHED + self.pushes, _FIRST_PUSHED + self.pushes + count)
        self.pushes += count
        fresh = {f"pushed{number}": answer_of(number, PUSHED_TOKENS) for number in numbers}
        self._unsure_pushes.append(fresh)
        self.books.push(fresh)
        await self._push(fresh)

    async def _push(self, prompts: Mapping[str, list[int]]) -> None:
        lines = [
            {"id": prompt_id, "input_ids": prompt_of(int(prompt_id.removeprefix("pushed"))), "ground_truth": answer}
            for prompt_id, answer in prompts.items()
        ]
        accepted = (await self._client.put_prompts("pushed", lines))["accepted"]
        self.books.pushed(prompts, accepted)
        self._unsure_pushes.remove(dict(prompts))

    async def pause(self) -> None:
        """Pause the stage."""
        await self._client.pause(deadline_s=2.0)

    async def resume(self) -> None:
        """Let it go on."""
        await self._client.resume()

    async def checkpoint(self, path: Path, ack: tuple[str, ...] = ()) -> None:
        """Have everything written beside what the trainer would write."""
        self._unsure_acks |= dict.fromkeys(ack)
        late = (await self._client.checkpoint(str(path), self.step, ack=list(ack))).get("ack_expired", ())
        for batch_id in ack:
            self._acked(batch_id, refused=batch_id in late)

    # -- what a trainer does ---------------------------------------------------------------------------------

    async def look(self) -> dict[str, Any]:
        """Hold the ledger against the books; only where nothing is unsure."""
        status = await self._client.status()
        self.books.audit(status["ledger"])
        return status

    async def settle(self) -> None:
        """Find out, in a new life, what the calls that were cut off have done; then audit."""
        for batch_id in list(self._unsure_acks):
            await self.ack(batch_id)
        for prompts in list(self._unsure_pushes):
            await self._push(prompts)
        for step in list(self.books.lent):
            if step in self.books.lent:  # a batch taken meanwhile may have shown that its lease has ended
                await self.take_again(step)
        await self.look()

    async def work(self, until: float) -> None:
        """Take, acknowledge and push until then (wall clock), or until there is nothing left."""
        while time.time() < until and self.books.left:
            await self.one_call()

    async def one_call(self) -> None:
        """Do one thing; a take that finds too little has at least waited."""
        lent = [held.batch_id for held in self.books.lent.values()]
        if self.pushes < self._most_pushed and self._rng.random() < 0.25:
            await self.push(self._rng.randint(1, 6))
            return
        if lent and (len(lent) >= _HELD or self.books.lendable <= 0 or self._rng.random() < 0.2):
            await self.ack(self._rng.choice(lent))
            return
        groups = min(self._rng.randint(1, 4), max(1, self.books.lendable))
        acks = tuple(batch_id for batch_id in lent if self._rng.random() < 0.5)
        try:
            await self.take(groups, acks)
        except NotNow:
            for batch_id in acks:  # they were taken in first, but nobody said so
                await self.ack(batch_id)

    async def finish(self, timeout_s: float) -> None:
        """Consume all that is left.

        Raises:
            AssertionError: it does not come.
        """
        end = time.time() + timeout_s
        self._most_pushed = 0
        while self.books.left:
            if time.time() > end:
                missing = self.books.due - self.books.consumed
                status = await self._client.status()
                told = {key: status[key] for key in ("state", "buffer", "ledger")}
                raise AssertionError(f"not within {timeout_s} s: {dict(missing)}; {told}")
            await self.one_call()
        await self.look()
