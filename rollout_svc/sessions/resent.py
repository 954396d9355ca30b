"""What a client sends again with every request: its whole conversation, of which only the end is new.

Where a body begins, byte for byte, as the last one did up to the end of its messages, those are not parsed again: what
they were read as is taken, and only what follows is parsed. Any other body is read whole.

Invariants:

- Pure, but for what it remembers.
- What comes out is what reading the whole body would have come to; what is refused then is refused so too. A body is
  taken apart only where each part is JSON by itself, put where it stands: a wrong cut is none.
- What was read once comes out as the same objects, so that comparing them takes no time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import orjson

from rollout_svc.sessions.exchange import Asked

__all__ = ["Reader", "Resent"]

_MESSAGES: Final = re.compile(rb'"messages"\s*:\s*\[')
_MARKS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)
"""Texts, which are stepped over, and brackets."""
_OPENING: Final = frozenset(b"[{")
_CLOSING: Final = frozenset(b"]}")
_LIST_END: Final = ord("]")
_SPACE: Final = frozenset(b" \t\r\n")
_MOST_NEW: Final = 1 << 18
"""Bytes that are looked through for the end of the messages: a few ms; where more is new, the body is read whole."""


class Reader(Protocol):
    """How an API's requests are read; modules are such."""

    def read_request(self, body: Any) -> Asked:
        """Read a whole body."""

    def read_messages(self, given: Sequence[Any], first: int) -> list[dict[str, Any]]:
        """Read its messages from the one at `first` on."""

    def read_fields(self, body: dict[str, Any], messages: Sequence[dict[str, Any]]) -> Asked:
        """Read the rest of it; its messages are read."""


class _Sent(NamedTuple):
    """A body that was read: up to `end`, after which its list of messages goes on, or ends."""

    reader: Reader
    raw: bytes
    end: int
    before: dict[str, Any]  # fields that stand before the messages
    items: int
    messages: tuple[dict[str, Any], ...]


class Resent:
    """The last body that a client sent, and what its messages were read as."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: _Sent | None = None

    def __repr__(self) -> str:
        return f"<Resent {0 if self._last is None else self._last.items} messages>"

    def read(self, raw: bytes, reader: Reader) -> Asked:
        """Read a body.

        Raises:
            ValueError: it is not JSON.
            BadRequest: as the reader says.
        """
        last = self._last
        if last is None or last.reader is not reader or not raw.startswith(memoryview(last.raw)[: last.end]):
            last = _beginning(raw, reader)
        cut = None if last is None else _cut(raw, last)
        if last is None or cut is None:
            self._last = None
            return reader.read_request(orjson.loads(raw))
        new, fields, end = cut
        messages = (*last.messages, *reader.read_messages(new, last.items))
        asked = reader.read_fields({**last.before, **fields}, messages)
        self._last = _Sent(reader, raw, end, last.before, last.items + len(new), messages)
        return asked


def _beginning(raw: bytes, reader: Reader) -> _Sent | None:
    """What stands before the first message; None: that cannot be told."""
    found = _MESSAGES.search(raw)
    if found is None:
        return None
    fields = _loaded(raw[: found.end()] + b"]}")
    if not isinstance(fields, dict) or next(reversed(fields), None) != "messages" or fields.pop("messages") != []:
        return None
    return _Sent(reader, raw, found.end(), fields, 0, ())


def _cut(raw: bytes, last: _Sent) -> tuple[list[Any], dict[str, Any], int] | None:
    """The messages after those that are known, the fields after them all, and where the last message ends."""
    end = _end(raw, last.end)
    if end is None:
        return None
    # An empty object stands for what comes before: only a comma, or the end, may follow it, as there.
    stand_in = b"{}" if last.items else b""
    new = _loaded(b"[%b%b]" % (stand_in, raw[last.end : end]))
    fields = _loaded(b'{"":{}%b' % raw[end + 1 :])
    if not isinstance(new, list) or not isinstance(fields, dict) or "messages" in fields:
        return None
    while raw[end - 1] in _SPACE:  # before the next message there may be none
        end -= 1
    return (new[1:] if stand_in else new), fields, end


def _end(raw: bytes, start: int) -> int | None:
    """Where the list ends that `start` is in; texts and brackets are paired, the rest is for the parser to judge."""
    if len(raw) - start > _MOST_NEW:
        return None
    depth = 0
    for mark in _MARKS.finditer(raw, start):
        place = mark.start()
        if raw[place] in _OPENING:
            depth += 1
        elif raw[place] in _CLOSING:
            if not depth:
                return place if raw[place] == _LIST_END else None
            depth -= 1
    return None


def _loaded(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except ValueError:
        return None
