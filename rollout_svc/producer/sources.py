"""Where prompts come from: a JSONL file, anything to iterate over, or a trainer that pushes.

Invariants:

- `peek` shows the next line without using it up; only `advance` moves the position, and it never waits. A prompt that
  could not be started is still the next one.
- Files and iterators are read in threads, a stretch at a time.
- A pushed id is accepted once per task.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from rollout_svc.config import PromptsConfig
from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.plugins import load_attr
from rollout_svc.producer.lines import check_line, prompt_id

__all__ = ["IteratorSource", "JsonlSource", "PromptSource", "PushSource", "make_source"]

_STRETCH: Final = 64  # lines read in one trip to a thread


class PromptSource(Protocol):
    """The prompts of one task."""

    exhausted: bool
    """No line will ever come again."""

    async def peek(self) -> Mapping[str, Any] | None:
        """The next line, or None when there is none now."""

    def advance(self) -> None:
        """Use up the line that `peek` showed."""


class _Ahead:
    """Lines read and not used up."""

    def __init__(self) -> None:
        self.exhausted = False
        self._lines: deque[Mapping[str, Any]] = deque()

    async def peek(self) -> Mapping[str, Any] | None:
        if not self._lines and not self.exhausted:
            lines = await asyncio.to_thread(self._read)
            self._lines.extend(lines)
            self.exhausted = not self._lines
        return self._lines[0] if self._lines else None

    def advance(self) -> None:
        self._lines.popleft()

    def _read(self) -> list[Mapping[str, Any]]:
        raise AssertionError("each source reads in its own way")


class JsonlSource(_Ahead):
    """A file with one prompt per line, in passes; each pass in its own seeded order."""

    def __init__(self, path: Path, config: PromptsConfig, *, has_tokenizer: bool, where: str) -> None:
        """Index and check the whole file; blocks, so make it before the loop or in a thread.

        Raises:
            ConfigError: at `where`, naming the first bad line, or that there is none at all.
        """
        super().__init__()
        self._path = path
        self._config = config
        self._offsets = _index(path, has_tokenizer=has_tokenizer, where=where)
        self._order = self._passes()

    def __len__(self) -> int:
        return len(self._offsets)

    def _passes(self) -> Iterator[int]:
        epoch = 0
        while self._config.epochs is None or epoch < self._config.epochs:
            order = list(range(len(self._offsets)))
            if self._config.shuffle:
                random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
            yield from order
            epoch += 1

    def _read(self) -> list[Mapping[str, Any]]:
        lines: list[Mapping[str, Any]] = []
        with self._path.open("rb") as file:
            for index in islice(self._order, _STRETCH):
                file.seek(self._offsets[index])
                lines.append(orjson.loads(file.readline()))
        return lines


class IteratorSource(_Ahead):
    """Anything to iterate over, found by `module:attr`; a callable is called first."""

    def __init__(self, iterable: Iterable[Any], *, has_tokenizer: bool, where: str) -> None:
        super().__init__()
        self._iterator = iter(iterable)
        self._has_tokenizer = has_tokenizer
        self._where = where
        self._count = 0

    def _read(self) -> list[Mapping[str, Any]]:
        lines: list[Mapping[str, Any]] = []
        for line in islice(self._iterator, _STRETCH):
            problem = check_line(line, has_tokenizer=self._has_tokenizer) or _not_json(line)
            if problem is not None:
                raise ConfigError.at(".".join((self._where, str(self._count), problem[0])).rstrip("."), problem[1])
            self._count += 1
            lines.append(line)
        return lines


class PushSource:
    """Prompts that arrive over the API; never exhausted."""

    exhausted = False

    def __init__(self, *, has_tokenizer: bool) -> None:
        self._has_tokenizer = has_tokenizer
        self._lines: deque[Mapping[str, Any]] = deque()
        self._seen: set[str] = set()

    def __len__(self) -> int:
        return len(self._lines)

    def push(self, lines: list[Any]) -> int:
        """Take lines in, all or none; returns how many were new.

        Raises:
            BadRequest: a line is wrong; nothing was taken.
        """
        for index, line in enumerate(lines):
            problem = check_line(line, has_tokenizer=self._has_tokenizer)
            if problem is not None:
                path = f"prompts.{index}.{problem[0]}".rstrip(".")
                raise BadRequest.at(path, problem[1])
        accepted = 0
        for line in lines:
            name = prompt_id(line)
            if name not in self._seen:
                self._seen.add(name)
                self._lines.append(line)
                accepted += 1
        return accepted

    async def peek(self) -> Mapping[str, Any] | None:
        """The oldest line that is left."""
        return self._lines[0] if self._lines else None

    def advance(self) -> None:
        """Use it up."""
        self._lines.popleft()


def make_source(config: PromptsConfig, *, has_tokenizer: bool, where: str) -> PromptSource:
    """Make the source a task names; reads files, so call it before the loop or in a thread.

    Raises:
        ConfigError: below `where` (`tasks.0.prompts`).
    """
    if config.push:
        return PushSource(has_tokenizer=has_tokenizer)
    if config.jsonl is not None:
        return JsonlSource(Path(config.jsonl), config, has_tokenizer=has_tokenizer, where=f"{where}.jsonl")
    where = f"{where}.source"
    try:
        found: Any = load_attr(str(config.source))
        iterable: Any = found() if isinstance(found, Callable) else found  # type: ignore[arg-type]
        return IteratorSource(iterable, has_tokenizer=has_tokenizer, where=where)
    except Exception as error:
        raise ConfigError.at(where, f"cannot use {config.source!r}: {type(error).__name__}: {error}") from error


def _index(path: Path, *, has_tokenizer: bool, where: str) -> array[int]:
    """Offsets of the lines that are not blank, each line checked."""
    offsets = array("q")
    try:
        with path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    _check_raw(raw, f"{path.name}:{number}", has_tokenizer=has_tokenizer, where=where)
                    offsets.append(offset)
                offset += len(raw)
    except OSError as error:
        raise ConfigError.at(where, f"cannot read {path}: {error.strerror or error}") from error
    if not offsets:
        raise ConfigError.at(where, f"{path} has no prompts")
    return offsets


def _not_json(line: Any) -> tuple[str, str] | None:
    """A line that did not come as JSON has to become some: it leaves with its batch."""
    try:
        orjson.dumps(line)
    except TypeError as error:
        return "", f"cannot be written as JSON: {error}"
    return None


def _check_raw(raw: bytes, at: str, *, has_tokenizer: bool, where: str) -> None:
    try:
        line = orjson.loads(raw)
    except ValueError as error:
        raise ConfigError.at(where, f"{at}: not JSON: {error}") from error
    problem = check_line(line, has_tokenizer=has_tokenizer)
    if problem is not None:
        raise ConfigError.at(where, f"{at}: {': '.join(part for part in problem if part)}")
