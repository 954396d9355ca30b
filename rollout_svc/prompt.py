"""What is to be answered: one prompt, as a value.

Invariant: everything in it can be written as JSON; sources check that when they read it, and hand on nothing of a line
that cannot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be answered.

    Attributes:
        prompt_id: given, or the hash of its line; repeats over dataset epochs.
        task: the name of its task.
        input_ids: encoded prompt, token ids.
        content: the line's own `messages` or `text`, or None when it came as ids.
        ground_truth: whatever the judger compares with.
        meta: opaque to us, handed on with the batch.
        engine_extra: opaque top-level keys for the engine.
    """

    prompt_id: str
    task: str
    input_ids: list[int]
    content: Any = None
    ground_truth: Any = None
    meta: dict[str, Any] = field(default_factory=dict)
    engine_extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The prompt's record in a batch: its line as it was spelled, and its ids."""
        line: dict[str, Any] = {"id": self.prompt_id}
        if self.content is not None:
            line["text" if isinstance(self.content, str) else "messages"] = self.content
        return line | {"input_ids": self.input_ids, "ground_truth": self.ground_truth, "meta": self.meta}
