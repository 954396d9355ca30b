"""Server-sent events, as far as engines use them: `data:` lines, split out of whatever pieces a socket gives.

Invariants:

- Pure: bytes in, payloads out, in order; a payload is given once its line is whole.
- A line that never ends is refused before it fills the memory.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DONE", "EventSplitter", "OverlongEventError"]

DONE: Final = b"[DONE]"
_MAX_LINE_BYTES: Final = 64 * 2**20  # a cumulative event of a long answer with its logprobs is some MiB


class OverlongEventError(ValueError):
    """Raised when one event is longer than any engine's answer."""


class EventSplitter:
    """Collects bytes and gives back the payloads of the `data:` lines that are whole."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completed.

        Raises:
            OverlongEventError: a line passed 64 MiB.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:
            raise OverlongEventError(f"an event of over {_MAX_LINE_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
