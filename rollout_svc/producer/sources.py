"""Where prompts come from: a JSONL file, anything to iterate over, or a trainer that pushes.

Invariants:

- Nothing here waits: `peek` shows the next line without using it up, only `advance` moves the position. A prompt that
  could not be started is still the next one.
- Files and iterators are read ahead by a thread per source, so that none holds up another (`reading`).
- A line that cannot be used is handed on with its problem; a source that raises is an error of the source.
- A pushed id is accepted once per task.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from rollout_svc.buffer.storage import Position
from rollout_svc.config import PromptsConfig
from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.plugins import load_attr
from rollout_svc.producer.lines import PromptLine, check_line, read_line
from rollout_svc.producer.reading import ReadAhead
from rollout_svc.tokens import Refused

__all__ = ["IteratorSource", "JsonlSource", "PromptSource", "PushSource", "make_source"]

_STRETCH: Final = 64  # lines read in one opening of a file


class PromptSource(Protocol):
    """The prompts of one task."""

    @property
    def exhausted(self) -> bool:
        """No line will ever come again."""

    @property
    def position(self) -> Position | None:
        """Where it stands: what is to be restored for the next line to be the same again; None: where it stood."""

    def restore(self, position: Position) -> None:
        """Go on after a position, of another process's source of the same configuration; before `open`."""

    def open(self, wake: Callable[[], None]) -> None:
        """Begin: `wake()` is called in this loop when there is a line, or an end, for whoever was shown none."""

    def close(self) -> None:
        """Give nothing more; idempotent, and returns at once."""

    def peek(self) -> PromptLine | None:
        """The next line, or None when there is none now."""

    def advance(self) -> None:
        """Use up the line that `peek` showed."""


class JsonlSource(ReadAhead):
    """A file with one prompt per line, in passes; each pass in its own seeded order."""

    def __init__(self, path: Path, config: PromptsConfig, *, refused: Refused, where: str) -> None:
        """Index and check the whole file; blocks, so make it before the loop or in a thread.

        Raises:
            ConfigError: at `where`, naming the first bad line, or that there is none at all; at the setting to blame
                for lines of a kind that is refused.
        """
        self._path = path
        self._config = config
        self._refused = refused
        self._where = where
        self._offsets = _index(path, refused=refused, where=where)
        super().__init__(f"prompts:{where}", self._read(0), first=_STRETCH)

    def __len__(self) -> int:
        return len(self._offsets)

    def restore(self, position: Position) -> None:
        """Go on after `position.used` lines; nothing of them is read."""
        self.begin_at(position, self._read(position.used))

    def _passes(self, used: int) -> Iterator[int]:
        """Places of lines, pass after pass, without the first `used`."""
        first, within = divmod(used, len(self._offsets))
        for epoch in count(first):
            if self._config.epochs is not None and epoch >= self._config.epochs:
                return
            order = list(range(len(self._offsets)))
            if self._config.shuffle:
                random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
            yield from islice(order, within if epoch == first else 0, None)

    def _read(self, used: int) -> Iterator[PromptLine]:
        order = self._passes(used)
        while stretch := list(islice(order, _STRETCH)):
            with self._path.open("rb") as file:
                lines = [self._line(file.seek(self._offsets[index]), file.readline()) for index in stretch]
            yield from lines

    def _line(self, offset: int, raw: bytes) -> PromptLine:
        """Read a line again: the file may have changed since it was checked."""
        at = f"{self._where}@{offset}"
        try:
            return read_line(orjson.loads(raw), self._refused, at)
        except ValueError as error:
            return PromptLine(at, problem=f"{at}: not JSON: {error}")


class IteratorSource(ReadAhead):
    """Anything to iterate over; a line that cannot be used is handed on with its problem."""

    def __init__(self, iterable: Iterable[Any], *, refused: Refused, where: str) -> None:
        lines = (read_line(line, refused, f"{where}.{index}") for index, line in enumerate(iterable))
        self._all = lines
        super().__init__(f"prompts:{where}", lines)

    def restore(self, position: Position) -> None:
        """Go on after `position.used` lines, by reading them again."""
        self.begin_at(position, islice(self._all, position.used, None))


class PushSource:
    """Prompts that arrive over the API; never exhausted."""

    exhausted = False

    def __init__(self, *, refused: Refused) -> None:
        self._refused = refused
        self._lines: deque[PromptLine] = deque()
        self._used = 0
        self._seen: set[str] = set()
        self._wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._lines)

    def open(self, wake: Callable[[], None]) -> None:
        """Tell `wake` of every push that brought something."""
        self._wake = wake

    def close(self) -> None:
        """Nothing to end."""

    @property
    def position(self) -> Position:
        """Where it stands."""
        return Position(self._used)

    def restore(self, position: Position) -> None:
        """Count what was used; the lines that are left come with `restore_lines`."""
        self._used = position.used

    def restore_lines(self, lines: Mapping[str, Mapping[str, Any]], known: Iterable[str] = ()) -> None:
        """Have these lines again, behind those that are there, and know their ids.

        Args:
            lines: content by prompt id, in order, as `Storage.pushed` was told; they were accepted once already.
            known: ids that were used up: pushed again, they are not accepted.
        """
        for prompt_id, content in lines.items():
            line = read_line(content, self._refused, prompt_id)  # what can become tokens may have changed since
            self._lines.append(PromptLine(prompt_id, line.content, line.problem))
            self._seen.add(prompt_id)
        self._seen.update(known)
        if lines:
            self._wake()

    def push(self, lines: list[Any]) -> list[PromptLine]:
        """Take lines in, all or none; returns those that were new.

        Raises:
            BadRequest: a line is wrong; nothing was taken.
        """
        read: list[PromptLine] = []
        for index, line in enumerate(lines):
            problem = check_line(line, self._refused)
            if problem is not None:
                raise BadRequest.at(f"prompts.{index}.{problem.path}".rstrip("."), problem.message)
            read.append(read_line(line, self._refused, f"prompts.{index}"))
        fresh = {line.prompt_id: line for line in reversed(read) if line.prompt_id not in self._seen}
        taken = list(reversed(fresh.values()))
        self._seen.update(fresh)
        self._lines.extend(taken)
        if taken:
            self._wake()
        return taken

    def peek(self) -> PromptLine | None:
        """The oldest line that is left."""
        return self._lines[0] if self._lines else None

    def advance(self) -> None:
        """Use it up."""
        self._lines.popleft()
        self._used += 1


def make_source(config: PromptsConfig, *, refused: Refused, where: str) -> PromptSource:
    """Make the source a task names; reads files, so call it before the loop or in a thread.

    Args:
        config: the task's prompts.
        refused: kinds of content that cannot become tokens here.
        where: dotted path of `config`: `tasks.0.prompts`.

    Raises:
        ConfigError: below `where`, or at the setting that makes a file's lines impossible.
    """
    if config.push:
        return PushSource(refused=refused)
    if config.jsonl is not None:
        return JsonlSource(Path(config.jsonl), config, refused=refused, where=f"{where}.jsonl")
    where = f"{where}.source"
    try:
        found: Any = load_attr(str(config.source))
        iterable: Any = found() if isinstance(found, Callable) else found  # type: ignore[arg-type]
        return IteratorSource(iterable, refused=refused, where=where)
    except Exception as error:
        raise ConfigError.at(where, f"cannot use {config.source!r}: {type(error).__name__}: {error}") from error


def _index(path: Path, *, refused: Refused, where: str) -> array[int]:
    """Offsets of the lines that are not blank, each line checked."""
    offsets = array("q")
    try:
        with path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    _check_raw(raw, f"{path.name}:{number}", refused=refused, where=where)
                    offsets.append(offset)
                offset += len(raw)
    except OSError as error:
        raise ConfigError.at(where, f"cannot read {path}: {error.strerror or error}") from error
    if not offsets:
        raise ConfigError.at(where, f"{path} has no prompts")
    return offsets


def _check_raw(raw: bytes, at: str, *, refused: Refused, where: str) -> None:
    try:
        line = orjson.loads(raw)
    except ValueError as error:
        raise ConfigError.at(where, f"{at}: not JSON: {error}") from error
    problem = check_line(line, refused)
    if problem is None:
        return
    blamed = refused.get(problem.path)
    if blamed is not None and blamed.path and blamed.message == problem.message:
        raise ConfigError.at(blamed.path, f"{at}: {problem}")
    raise ConfigError.at(where, f"{at}: {problem}")
