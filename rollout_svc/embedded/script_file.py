"""Scripts as files: JSON objects one after the other, or one list of them.

| object | says |
|---|---|
| `{"match": {…}, "say": text or [texts], "peak": 0.99}` | a rule; `say` as a list: the first time the rule decides in a conversation, the second, …, the last one from then on |
| `{"turn": text or [ids]}` | what the prompt has where the model is to speak, as the chat template's `<|assistant|>`; once in a file |

Conditions of `match`, all of which a prompt has to meet: `contains`, `ends_with`, `regex` (of its text up to where the
model speaks, special tokens written out), `ids_end`; `{}`: any prompt. `peak` is 1 unless it is given: the text comes
out exactly. A list in `say` needs `turn`.

Invariants:
- A file is used whole or not at all; what is wrong in it is told with file and line.
"""  # noqa: E501 - a table

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollout_svc.embedded.script import Rule, Script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout_svc.embedded.tokens import Vocabulary

_SPACE: Final = re.compile(r"[ \t\r\n]*")
Ids = Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]
Model = TypeVar("Model", bound=BaseModel)
Text = Annotated[str, Field(min_length=1)]


class ScriptError(ValueError):
    """Raised when a script cannot be used."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Match(_Strict):
    contains: Text = Field("", validate_default=False)
    ends_with: Text = Field("", validate_default=False)
    regex: re.Pattern[str] | None = None
    ids_end: Ids | None = None

    @field_validator("regex", mode="before")
    @classmethod
    def _compiled(cls, value: Any) -> Any:
        try:
            return re.compile(value) if isinstance(value, str) else value
        except re.error as error:
            raise ValueError(str(error)) from None


class _Rule(_Strict):
    match: _Match
    say: str | Annotated[list[str], Field(min_length=1)]
    peak: float = Field(1.0, gt=0, le=1)


class _Turn(_Strict):
    turn: Text | Ids


def load_script(path: str | Path, vocabulary: Vocabulary) -> Script:
    """Read a script.

    Args:
        path: The file.
        vocabulary: Of the engine that is to say it.

    Raises:
        ScriptError: It cannot be read, is no script, or the vocabulary has no end token; with file and line.
    """
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScriptError(f"{path}: cannot be read: {error}") from None
    end = vocabulary.end_id
    if end is None:
        raise ScriptError(f"{path}: the tokenizer names no end token, which ends what a script says")
    turn: tuple[int, ...] = ()
    rules: list[Rule] = []
    lists = ""
    for line, found in _objects(source, path):
        where = f"{path}:{line}"
        if isinstance(found, dict) and "turn" in found:
            if turn:
                raise ScriptError(f"{where}: turn: is given twice")
            given = _read(_Turn, found, where).turn
            turn = tuple(
                _known(given, vocabulary, f"{where}: turn") if isinstance(given, list) else _ids(given, vocabulary)
            )
            continue
        rule = _read(_Rule, found, where)
        if isinstance(rule.say, list):
            lists = lists or where
        rules.append(_rule(rule, vocabulary, end, where))
    if lists and not turn:
        raise ScriptError(f'{lists}: say: a list needs {{"turn": …}} in the file, to count by')
    return Script(rules, vocabulary, turn)


def _rule(given: _Rule, vocabulary: Vocabulary, end: int, where: str) -> Rule:
    says = [given.say] if isinstance(given.say, str) else given.say
    match = given.match
    return Rule(
        says=tuple((*_ids(text, vocabulary), end) for text in says),
        peak=given.peak,
        contains=match.contains,
        ends_with=match.ends_with,
        regex=match.regex,
        ids_end=tuple(_known(match.ids_end or [], vocabulary, f"{where}: match.ids_end")),
    )


def _ids(text: str, vocabulary: Vocabulary) -> list[int]:
    return vocabulary.encode(text, bare=True)


def _known(ids: list[int], vocabulary: Vocabulary, where: str) -> list[int]:
    outside = next((token for token in ids if token >= vocabulary.size), None)
    if outside is not None:
        raise ScriptError(f"{where}: {outside} is outside the vocabulary of {vocabulary.size}")
    return ids


def _read(kind: type[Model], found: Any, where: str) -> Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ScriptError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from None


def _objects(source: str, path: str | Path) -> Iterator[tuple[int, Any]]:
    """Read the values of a file, each with the line it begins at."""
    decoder = json.JSONDecoder()
    place = _after_space(source, 0)
    listed = source.startswith("[", place)
    place += listed
    while True:
        place = _after_space(source, place)
        if place == len(source) or (listed and source[place] == "]"):
            break
        began = place
        try:
            found, place = decoder.raw_decode(source, place)
        except ValueError as error:
            wrong = getattr(error, "pos", place)
            raise ScriptError(f"{path}:{_line(source, wrong)}: no JSON: {getattr(error, 'msg', error)}") from None
        yield _line(source, began), found
        place = _after_space(source, place)
        if listed and source.startswith(",", place):
            place += 1
        elif listed and not source.startswith("]", place):
            raise ScriptError(f"{path}:{_line(source, place)}: no JSON: expected a comma, or the end of the list")
    if _after_space(source, place + listed) < len(source):
        raise ScriptError(f"{path}:{_line(source, place)}: no JSON: something follows the list")
    if listed and place == len(source):
        raise ScriptError(f"{path}:{_line(source, place)}: no JSON: the list does not end")


def _after_space(source: str, place: int) -> int:
    found = _SPACE.match(source, place)
    return found.end() if found else place


def _line(source: str, place: int) -> int:
    return source.count("\n", 0, place) + 1
