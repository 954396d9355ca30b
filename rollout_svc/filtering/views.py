"""What a filter sees of a finished group.

Invariants:

- Nothing a filter does to a view changes the group: fields are frozen, and whatever could be changed is a copy.
- What is heavy, or takes making, is made when it is asked for: a filter that compares rewards costs nothing else.
- A view is good for one call. When that is over it is closed, and whoever kept it keeps no text and no tokens (P28).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import orjson

from rollout_svc.group import Group
from rollout_svc.prompt import Prompt
from rollout_svc.segment import FinishReason, VersionSpan

__all__ = ["GroupView", "SampleView", "view_of"]


class _Payload:
    """What a view leads to, until it is closed."""

    __slots__ = ("_packed", "_prompt")

    def __init__(self, prompt: Prompt, packed: tuple[bytes, ...]) -> None:
        self._prompt: Prompt | None = prompt
        self._packed: tuple[bytes, ...] | None = packed

    @property
    def prompt(self) -> Prompt:
        if self._prompt is None:
            raise RuntimeError("this group was decided on: a filter may look at one only until it has answered")
        return self._prompt

    def of_sample(self, index: int, key: str) -> Any:
        packed = self._packed
        if packed is None:
            raise RuntimeError("this group was decided on: a filter may look at one only until it has answered")
        return orjson.loads(packed[index])[key]

    def close(self) -> None:
        self._prompt = self._packed = None


class _OfPrompt:
    """What a view shows of its prompt; the view has the payload."""

    __slots__ = ()

    _payload: _Payload

    @property
    def prompt(self) -> Any:
        """The line's own `messages` or `text`; None when it came as ids."""
        return copy.deepcopy(self._payload.prompt.content)

    @property
    def prompt_ids(self) -> list[int]:
        """The encoded prompt."""
        return list(self._payload.prompt.input_ids)

    @property
    def ground_truth(self) -> Any:
        """Whatever the judger compared with."""
        return copy.deepcopy(self._payload.prompt.ground_truth)


@dataclass(frozen=True, slots=True)
class SampleView(_OfPrompt):
    """One judged answer, as a judger saw it and with what came of that.

    Attributes:
        sample_id: `<group_id>.<index>`.
        group_id: of its group.
        task: its name.
        index: its place in the group, from 0.
        status: `COMPLETED`.
        reward: what the judger gave.
        finish_reason: `stop`, `length` or `tool_calls`.
        engine_finish_reason: the engine's own word.
        response_length: response tokens, the environment's included.
        weight_versions: which weights made which of them.
    """

    sample_id: str
    group_id: str
    task: str
    index: int
    status: str
    reward: float
    finish_reason: FinishReason | None
    engine_finish_reason: str | None
    response_length: int
    weight_versions: tuple[VersionSpan, ...]
    _payload: _Payload = field(repr=False, compare=False)

    @property
    def reward_parts(self) -> dict[str, float]:
        """Named parts of the reward."""
        parts: dict[str, float] = self._payload.of_sample(self.index, "reward_parts")
        return parts

    @property
    def response(self) -> str | None:
        """Its text; None without a tokenizer."""
        text: str | None = self._payload.of_sample(self.index, "response")
        return text

    @property
    def response_ids(self) -> list[int]:
        """Its token ids."""
        ids: list[int] = self._payload.of_sample(self.index, "response_ids")
        return ids

    @property
    def loss_mask(self) -> list[int]:
        """1 where the model made the token, else 0."""
        mask: list[int] = self._payload.of_sample(self.index, "loss_mask")
        return mask

    @property
    def meta(self) -> dict[str, Any]:
        """What prompt and agent noted."""
        meta: dict[str, Any] = self._payload.of_sample(self.index, "meta")
        return meta


@dataclass(frozen=True, slots=True)
class GroupView(_OfPrompt):
    """All answers to one prompt, every one of them judged.

    Attributes:
        group_id: unique per admission.
        task: its name.
        prompt_id: given, or the hash of the prompt's line.
        samples: the answers, in order.
    """

    group_id: str
    task: str
    prompt_id: str
    samples: tuple[SampleView, ...]
    _payload: _Payload = field(repr=False, compare=False)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Every sample's reward, in order."""
        return tuple(sample.reward for sample in self.samples)

    @property
    def meta(self) -> dict[str, Any]:
        """What the line said beside."""
        return copy.deepcopy(self._payload.prompt.meta)

    def close(self) -> None:
        """End the call it was made for; idempotent."""
        self._payload.close()


def view_of(group: Group) -> GroupView:
    """Make the view of a group whose members are all COMPLETED."""
    payload = _Payload(group.prompt, tuple(sample.packed or b"" for sample in group.samples))
    samples = tuple(
        SampleView(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            task=group.prompt.task,
            index=sample.index,
            status=str(sample.status),
            reward=sample.reward or 0.0,
            finish_reason=sample.finish_reason,
            engine_finish_reason=sample.engine_finish_reason,
            response_length=sample.response_length,
            weight_versions=sample.weight_versions,
            _payload=payload,
        )
        for sample in group.samples
    )
    return GroupView(group.group_id, group.prompt.task, group.prompt.prompt_id, samples, payload)
