"""From a prompt to a group that the ledger counts.

Invariants:

- A group is counted, noted with its source's position, and told of in one synchronous step.
- A prompt that cannot be used is admitted and settled FAILED, with its problem said: it is counted and not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import Position, Storage
from rollout_svc.errors import SampleFailure
from rollout_svc.events import EventBus, GroupAdmitted, SampleFailed
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.producer.caution import Cautions
from rollout_svc.producer.lines import PromptLine
from rollout_svc.prompt import Prompt
from rollout_svc.rollout.settling import Settling
from rollout_svc.rollout.tally import Tally

__all__ = ["Admission", "prompt_of"]


def prompt_of(line: PromptLine, task: str, input_ids: list[int]) -> Prompt:
    """Make the prompt of a line.

    Args:
        line: as its source gave it.
        task: whose.
        input_ids: what it was encoded to; empty where it could not be.
    """
    content = line.content
    return Prompt(
        prompt_id=line.prompt_id,
        task=task,
        input_ids=input_ids,
        content=content.get("messages") or content.get("text"),
        ground_truth=content.get("ground_truth"),
        meta=dict(content.get("meta") or {}),
        engine_extra=dict(content.get("engine_extra") or {}),
    )


class Admission:
    """Enters groups; see the module's invariants.

    Attributes:
        group_size: samples of the groups that are entered from now on.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        buffer: ReplayBuffer,
        storage: Storage,
        settling: Settling,
        tally: Tally,
        bus: EventBus,
        caution: Cautions,
        new_id: Callable[[], str],
    ) -> None:
        self.group_size = 1
        self._ledger = ledger
        self._buffer = buffer
        self._storage = storage
        self._settling = settling
        self._tally = tally
        self._bus = bus
        self._caution = caution
        self._new_id = new_id

    def enter(self, prompt: Prompt, position: Position | None) -> Group:
        """Admit a prompt; the caller starts the group or settles it in this very step.

        Args:
            prompt: what is to be answered.
            position: where its source stands after it; None: it came from no source.
        """
        now = asyncio.get_running_loop().time()
        group = Group(
            group_id=self._new_id(),
            prompt=prompt,
            size=self.group_size,
            lane="train",
            ledger=self._ledger,
            now=now,
        )
        self._storage.admitted(group, position)
        self._caution.admitted(prompt.task, now)
        self._bus.emit(GroupAdmitted(group.group_id, prompt.task, self.group_size))
        return group

    def fail(self, group: Group, failure: SampleFailure) -> None:
        """Settle a group whose prompt cannot be used; trying it again would change nothing."""
        reason = failure.reason
        self._tally.failed[reason] += 1
        failed = SampleFailed(group.samples[0].sample_id, group.prompt.task, reason, failure.message, 1, final=True)
        self._bus.emit(failed)
        self._settling.settle(group, "failed", reason)
        self._buffer.changed()  # a batch may have waited for it
