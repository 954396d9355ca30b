"""Finds one key's value in JSON that comes in pieces, and takes it out: what is left has null in its place.

A parser would have to hold 64 MiB whole, and the event loop with it. To find the value nothing has to be parsed: the
key with its quotes cannot stand within a string, whose own quotes are escaped; a base64 string ends at its quote; and
a list of numbers has neither quotes nor braces in it, while one of the two follows it, for it is a value in an object.

Invariants:

- Pure, and any cut gives the same: bytes in; out come the parts, in order, never more than a few bytes late.
- The rest is what came, byte for byte, with null where a string or a list stood as the value of the key, at any depth,
  any number of times: one JSON value or several in lines, as server-sent events have them. Other values stay.
- Each byte is looked at by searches that run at the speed of memory; what grows is never searched again.

The key is recognised as engines write it: without escapes.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import orjson

from rollout_svc.errors import SampleFailure

__all__ = ["Part", "Scanner"]

_BLANKS: Final = b" \t\r\n"
_QUOTE, _BACKSLASH, _BRACKET, _COLON = b'"\\[:'
_UNIT: Final = 6  # bytes of \uXXXX
_HELD: Final = 64 * 1024  # bytes of nothing but blanks and commas in a list: no engine writes that


class Part(NamedTuple):
    """Something that came.

    Attributes:
        kind: `rest`: of what is left; `string` and `list`: a value begins; `piece`: of it, without a string's quotes
            and escapes; `end`: it is whole.
        data: the bytes of a rest or of a piece.
    """

    kind: Literal["rest", "string", "list", "piece", "end"]
    data: bytes = b""


_NULL: Final = Part("rest", b"null")
_END: Final = Part("end")


class Scanner:
    """Takes the values of one key out of a body.

    Args:
        key: printable ASCII.
    """

    __slots__ = ("_before", "_held", "_parts", "_pattern", "_step")

    def __init__(self, key: str) -> None:
        self._pattern = b'"%b"' % key.encode()
        self._held = b""  # the beginning of something that cannot be told yet
        self._before = 0  # the last byte of the rest
        self._parts: list[Part] = []
        self._step = self._rest

    def feed(self, data: bytes) -> list[Part]:
        """Take the next bytes; return what they brought.

        Raises:
            SampleFailure: `experts_invalid`: a string with an escape that there is not, a list of nothing.
        """
        if self._held:
            data, self._held = self._held + data, b""
        parts: list[Part] = []
        self._parts = parts
        at = 0
        while at < len(data):
            at = self._step(data, at)
        return parts

    def finish(self) -> list[Part]:
        """Return what was held back, once all has come."""
        held, self._held = self._held, b""
        return [Part("rest", held)] if held else []

    # -- steps: each looks at `data` from `at` on, and returns how far it got -----------------------------------

    def _rest(self, data: bytes, at: int) -> int:
        """Outside of a value: look for the key."""
        pattern = self._pattern
        found = data.find(pattern, at)
        while found >= 0 and (data[found - 1] if found > at else self._before) == _BACKSLASH:
            found = data.find(pattern, found + 1)  # the end of a string that has an escaped quote
        if found >= 0:
            self._keep(data, at, found + len(pattern))
            self._step = self._colon
            return found + len(pattern)
        end = len(data)
        quote = data.rfind(b'"', max(at, end - len(pattern) + 1))
        if quote >= 0 and pattern.startswith(data[quote:]):
            end = quote
            self._held = data[quote:]
        self._keep(data, at, end)
        return len(data)

    def _colon(self, data: bytes, at: int) -> int:
        """After the key, if that is what it was."""
        if data[at] == _COLON:
            self._step = self._value
        elif data[at] not in _BLANKS:
            self._step = self._rest
            return at
        self._keep(data, at, at + 1)
        return at + 1

    def _value(self, data: bytes, at: int) -> int:
        """After the colon."""
        if data[at] in _BLANKS:
            self._keep(data, at, at + 1)
            return at + 1
        if data[at] == _QUOTE:
            self._parts += (_NULL, Part("string"))
            self._step = self._string
            return at + 1
        if data[at] == _BRACKET:
            self._parts += (_NULL, Part("list"))
            self._step = self._list
            return at
        self._step = self._rest
        return at

    def _string(self, data: bytes, at: int) -> int:
        """Within a string."""
        end = data.find(b'"', at)
        while (escape := data.find(b"\\", at, end if end >= 0 else len(data))) >= 0:
            self._piece(data, at, escape)
            size = _escape_bytes(data, escape)
            if escape + size > len(data):
                self._held = data[escape:]
                return len(data)
            at = escape + size
            try:
                self._parts.append(Part("piece", orjson.loads(b'"%b"' % data[escape:at]).encode()))
            except orjson.JSONDecodeError as error:
                raise _invalid(f"an escape that there is not: {data[escape:at]!r}") from error
            if 0 <= end < at:
                end = data.find(b'"', at)
        if end < 0:
            self._piece(data, at, len(data))
            return len(data)
        self._piece(data, at, end)
        return self._ended(end + 1)

    def _list(self, data: bytes, at: int) -> int:
        """Within a list: it ends before the brace, or before the comma and the quote, of what follows it."""
        brace = data.find(b"}", at)
        quote = data.find(b'"', at, brace if brace >= 0 else len(data))
        after = quote if quote >= 0 else brace
        piece = data[at:after] if after >= 0 else data[at:]
        solid = piece.rstrip(b" \t\r\n,")
        self._piece(solid, 0, len(solid))
        if after >= 0:
            return self._ended(at + len(solid))
        self._held = piece[len(solid) :]
        if len(self._held) > _HELD:
            raise _invalid("a list that is mostly blanks and commas")
        return len(data)

    def _ended(self, at: int) -> int:
        self._parts.append(_END)
        self._before = 0
        self._step = self._rest
        return at

    def _keep(self, data: bytes, start: int, end: int) -> None:
        if end > start:
            self._parts.append(Part("rest", data[start:end]))
            self._before = data[end - 1]

    def _piece(self, data: bytes, start: int, end: int) -> None:
        if end > start:
            self._parts.append(Part("piece", data[start:end]))


def _escape_bytes(data: bytes, at: int) -> int:
    """Bytes of the escape that begins there; where that cannot be told yet, more than there are."""
    if data[at + 1 : at + 2] != b"u":
        return 2
    high = data[at + 2 : at + 4].lower()
    return 2 * _UNIT if high in (b"d8", b"d9", b"da", b"db") else _UNIT


def _invalid(what: str) -> SampleFailure:
    return SampleFailure("experts_invalid", f"routed experts: {what}")
