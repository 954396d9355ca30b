"""Prompts that come back when an earlier step is restored: they go before what their source gives.

Invariants:

- A prompt that comes back is admitted once more, and moves no position: its source has given it already.
- Behind them the source is what it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollout_svc.buffer.storage import Position
from rollout_svc.producer.lines import PromptLine
from rollout_svc.producer.sources import PromptSource
from rollout_svc.prompt import Prompt

__all__ = ["ReturnedFirst", "returned_first"]


class ReturnedFirst:
    """A source with some prompts before it."""

    def __init__(self, source: PromptSource, prompts: Iterable[Prompt]) -> None:
        self._source = source
        self._lines = deque(PromptLine(prompt.prompt_id, _content(prompt)) for prompt in prompts)

    def __repr__(self) -> str:
        return f"<ReturnedFirst {len(self._lines)} before {self._source!r}>"

    @property
    def exhausted(self) -> bool:
        """No line will ever come again."""
        return not self._lines and self._source.exhausted

    @property
    def skips(self) -> int:
        """Lines that the source reads again and drops."""
        return self._source.skips

    @property
    def position(self) -> Position:
        """Where the source stands."""
        return self._source.position

    def as_json(self) -> dict[str, Any]:
        """What status says of the source."""
        return self._source.as_json() | {"exhausted": self.exhausted}

    def restore(self, position: Position) -> None:
        """Begin where the source stood in an earlier life."""
        self._source.restore(position)

    def open(self, wake: Callable[[], None]) -> None:
        """Begin."""
        self._source.open(wake)

    def close(self) -> None:
        """Give nothing more."""
        self._source.close()

    def peek(self) -> PromptLine | None:
        """The next line, or None when there is none now."""
        return self._lines[0] if self._lines else self._source.peek()

    def advance(self) -> Position | None:
        """Use up the line that `peek` showed; None after a prompt that came back: the source stands where it stood."""
        if not self._lines:
            return self._source.advance()
        self._lines.popleft()
        return None


def returned_first(sources: Mapping[str, PromptSource], prompts: Iterable[Prompt]) -> dict[str, PromptSource]:
    """Put prompts before the sources of their tasks, in their order."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    found = dict(sources)
    for task, returned in by_task.items():
        found[task] = ReturnedFirst(sources[task], returned)
    return found


def _content(prompt: Prompt) -> dict[str, Any]:
    """The line a prompt was read from, as far as it matters: it is encoded once more, by the same tokenizer."""
    line: dict[str, Any] = {"ground_truth": prompt.ground_truth, "meta": prompt.meta}
    if prompt.engine_extra:
        line["engine_extra"] = prompt.engine_extra
    if prompt.content is None:
        return line | {"input_ids": prompt.input_ids}
    return line | {"text" if isinstance(prompt.content, str) else "messages": prompt.content}
