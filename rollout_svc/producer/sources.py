"""Where prompts come from: a JSONL file, anything to iterate over, or a trainer that pushes.

Invariants:

- Nothing here waits: `peek` shows the next line without using it up, only `advance` moves the position. A prompt that
  could not be started is still the next one.
- Files and iterators are read ahead by a thread per source, so that none holds up another (`reading`).
- A line that cannot be used is handed on with its problem; a source that raises is an error of the source.
- A source restored to a position gives exactly what it would have given after it. A file gets there by arithmetic, an
  object with `state()` and `restore(state)` by itself; any other reads again what was used, and says so (`skips`).
- A shard's source gives the lines whose place in the order of all is in its portion, and its position counts those.
- A pushed id is accepted once per task. That costs about 100 bytes for each id there ever was; their number is told.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from rollout_svc.buffer.storage import Position
from rollout_svc.config import WHOLE, Portion, PromptsConfig
from rollout_svc.errors import BadRequest, ConfigError
from rollout_svc.plugins import load_attr
from rollout_svc.producer.lines import PromptLine, check_line, read_line
from rollout_svc.producer.reading import ReadAhead, Stated
from rollout_svc.tokens import Refused

__all__ = ["IteratorSource", "JsonlSource", "PromptSource", "PushSource", "make_source"]

_STRETCH: Final = 64  # lines read in one opening of a file
_DIGEST_BYTES: Final = 12  # of a pushed id: a third of the memory, and no collision to be expected


class PromptSource(Protocol):
    """The prompts of one task."""

    @property
    def skips(self) -> int:
        """Lines that are read again and dropped, to get to where it was restored to."""

    @property
    def exhausted(self) -> bool:
        """No line will ever come again."""

    @property
    def position(self) -> Position:
        """Where it stands: what is to be restored for the next line to be the same again."""

    def restore(self, position: Position) -> None:
        """Go on after a position, of another process's source of the same configuration; before `open`."""

    def as_json(self) -> dict[str, Any]:
        """What status says of it: `used`, `epoch`, `exhausted`, `known_ids`."""

    def open(self, wake: Callable[[], None]) -> None:
        """Begin: `wake()` is called in this loop when there is a line, or an end, for whoever was shown none."""

    def close(self) -> None:
        """Give nothing more; idempotent, and returns at once."""

    def peek(self) -> PromptLine | None:
        """The next line, or None when there is none now."""

    def advance(self) -> Position | None:
        """Use up the line that `peek` showed; returns where it stands now, None: where it stood."""


class JsonlSource(ReadAhead):
    """A file with one prompt per line, in passes; each pass in its own seeded order."""

    def __init__(
        self, path: Path, config: PromptsConfig, *, refused: Refused, where: str, portion: Portion = WHOLE
    ) -> None:
        """Index and check the whole file; blocks, so make it before the loop or in a thread.

        Raises:
            ConfigError: at `where`, naming the first bad line, or that there is none at all; at the setting to blame
                for lines of a kind that is refused.
        """
        self._path = path
        self._config = config
        self._refused = refused
        self._where = where
        self._portion = portion
        self._offsets = _index(path, refused=refused, where=where)
        super().__init__(f"prompts:{where}", self._read(0), first=_STRETCH)

    def __len__(self) -> int:
        return self._portion.count(len(self._offsets))

    @property
    def epoch(self) -> int | None:
        """Passes that were begun: that of the line that was used last."""
        return -(-self._used // max(1, len(self)))

    def restore(self, position: Position) -> None:
        """Go on after `position.used` lines; nothing of them is read."""
        self.begin_at(Position(position.used), self._read(position.used))

    def _passes(self, used: int) -> Iterator[int]:
        """Places of lines, pass after pass, without the first `used`."""
        if not len(self):  # fewer lines than shards
            return
        first, within = divmod(used, len(self))
        for epoch in count(first):
            if self._config.epochs is not None and epoch >= self._config.epochs:
                return
            order = list(range(len(self._offsets)))
            if self._config.shuffle:
                random.Random(f"{self._config.seed}:{epoch}").shuffle(order)
            own = order[self._portion.index :: self._portion.of]
            yield from islice(own, within if epoch == first else 0, None)

    def _read(self, used: int) -> Iterator[Stated]:
        order = self._passes(used)
        while stretch := list(islice(order, _STRETCH)):
            with self._path.open("rb") as file:
                lines = [self._line(file.seek(self._offsets[index]), file.readline()) for index in stretch]
            yield from ((line, None) for line in lines)

    def _line(self, offset: int, raw: bytes) -> PromptLine:
        """Read a line again: the file may have changed since it was checked."""
        at = f"{self._where}@{offset}"
        try:
            return read_line(orjson.loads(raw), self._refused, at)
        except ValueError as error:
            return PromptLine(at, problem=f"{at}: not JSON: {error}")


class IteratorSource(ReadAhead):
    """Anything to iterate over; a line that cannot be used is handed on with its problem.

    An object may keep its own position: `state()`, anything that JSON can hold and best a small thing, is asked after
    each line, in the thread that reads; `restore(state)` is called there before the first, and the object is iterated
    over after that. Neither has to be quick; what either raises is an error of the source.
    """

    def __init__(self, iterable: Any, *, refused: Refused, where: str, portion: Portion = WHOLE) -> None:
        """Make the source; begins to iterate only over what has no `restore`.

        Raises:
            TypeError: it cannot be iterated over, or has one of `state` and `restore` without the other.
        """
        self._refused = refused
        self._where = where
        self._portion = portion
        self._iterable = iterable
        self._stateful = _keeps_state(iterable)
        if self._stateful and not isinstance(iterable, Iterable):
            raise TypeError(f"{type(iterable).__name__!r} object is not iterable")
        self._begun = None if self._stateful else iter(iterable)
        super().__init__(f"prompts:{where}", self._read(Position(0)))

    def restore(self, position: Position) -> None:
        """Go on after a position: by its `state` where there is one, else by reading again what was used."""
        skips = 0 if self._resumes(position) else self._portion.after(position.used)
        self.begin_at(position, self._read(position), skips=skips)

    def _resumes(self, position: Position) -> bool:
        return self._stateful and position.state is not None

    def _read(self, position: Position) -> Iterator[Stated]:
        if self._resumes(position):
            self._go_to(position.state)
        lines = iter(self._iterable) if self._begun is None else self._begun
        if not self._resumes(position):
            self._skip(lines, self._portion.after(position.used))
        for number, line in enumerate(lines, self._portion.after(position.used)):
            if self._portion.has(number):
                yield read_line(line, self._refused, f"{self._where}.{number}"), self._state_now()

    def _skip(self, lines: Iterator[Any], used: int) -> None:
        missing = object()
        for number in range(used):
            if next(lines, missing) is missing:
                raise RuntimeError(f"{self._where} gave {number} lines, but {used} were used before: it has changed")

    def _go_to(self, state: Any) -> None:
        keeper: Any = self._iterable
        try:
            keeper.restore(state)
        except Exception as error:
            raise RuntimeError(f"{self._where}: restore() raised {type(error).__name__}: {error}") from error

    def _state_now(self) -> bytes | None:
        """What the source says of its position, as it is now: it may change the object that it returned."""
        if not self._stateful:
            return None
        keeper: Any = self._iterable
        try:
            state = keeper.state()
        except Exception as error:
            raise RuntimeError(f"{self._where}: state() raised {type(error).__name__}: {error}") from error
        try:
            return orjson.dumps(state)
        except TypeError as error:
            raise RuntimeError(f"{self._where}: state() gave what JSON cannot hold: {error}") from error


class PushSource:
    """Prompts that arrive over the API; never exhausted."""

    exhausted = False
    skips = 0

    def __init__(self, *, refused: Refused) -> None:
        self._refused = refused
        self._lines: deque[PromptLine] = deque()
        self._used = 0
        self._seen: set[bytes] = set()  # digests: they are kept as long as the service lives
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
            self._seen.add(_digest(prompt_id))
        self._seen.update(map(_digest, known))
        if lines:
            self._wake()

    def as_json(self) -> dict[str, Any]:
        """What status says of it."""
        return {"used": self._used, "epoch": None, "exhausted": False, "known_ids": len(self._seen)}

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
        fresh: dict[bytes, PromptLine] = {}
        for line in read:
            fresh.setdefault(_digest(line.prompt_id), line)
        taken = [line for digest, line in fresh.items() if digest not in self._seen]
        self._seen.update(fresh)
        self._lines.extend(taken)
        if taken:
            self._wake()
        return taken

    def peek(self) -> PromptLine | None:
        """The oldest line that is left."""
        return self._lines[0] if self._lines else None

    def advance(self) -> Position:
        """Use it up; returns where it stands now."""
        self._lines.popleft()
        self._used += 1
        return self.position


def make_source(config: PromptsConfig, *, refused: Refused, where: str, portion: Portion = WHOLE) -> PromptSource:
    """Make the source a task names; reads files, so call it before the loop or in a thread.

    Args:
        config: the task's prompts.
        refused: kinds of content that cannot become tokens here.
        where: dotted path of `config`: `tasks.0.prompts`.
        portion: which of the lines are this service's; a trainer pushes to each shard what is that shard's.

    Raises:
        ConfigError: below `where`, or at the setting that makes a file's lines impossible.
    """
    if config.push:
        return PushSource(refused=refused)
    if config.jsonl is not None:
        return JsonlSource(Path(config.jsonl), config, refused=refused, where=f"{where}.jsonl", portion=portion)
    where = f"{where}.source"
    try:
        found: Any = load_attr(str(config.source))
        iterable: Any = found() if isinstance(found, Callable) else found  # type: ignore[arg-type]
        return IteratorSource(iterable, refused=refused, where=where, portion=portion)
    except Exception as error:
        raise ConfigError.at(where, f"cannot use {config.source!r}: {type(error).__name__}: {error}") from error


def _digest(prompt_id: str) -> bytes:
    return hashlib.sha256(prompt_id.encode()).digest()[:_DIGEST_BYTES]


def _keeps_state(source: object) -> bool:
    """Whether a source keeps its own position.

    Raises:
        TypeError: it has half of what that takes.
    """
    has = [callable(getattr(source, method, None)) for method in ("state", "restore")]
    if any(has) and not all(has):
        raise TypeError("it has state() but not restore(state)" if has[0] else "it has restore(state) but not state()")
    return all(has)


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
