"""Where a turn that was cut is gone on with, so that a text it should stop at is not missed.

An engine looks for stop texts in what one call of it generates, never in what it is given: where a cut divides such a
text, nobody sees it. So the last tokens before a cut are made again, as far back as a stop text may have begun.

Invariants:

- Where the text is known, nothing that is kept ends as a stop text begins: a stop text that the turn comes to lies in
  what the next call makes, whatever that is. Some engines look for stop texts with special tokens written out, others
  without: what one of the two may take for a beginning is none to keep.
- Where it is not, every token is taken for one byte at least: whatever had begun before the tokens that are given back
  would have been complete before the cut. Whoever makes the same tokens again misses nothing.
- Half a character is what it may become.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rollout_svc.config import SamplingConfig

__all__ = ["Decode", "beginning", "given_back", "stops_of"]

Decode = Callable[[Sequence[int]], str]

_CUT: Final = "\N{REPLACEMENT CHARACTER}"
_HALF: Final = 3  # bytes of a character that is not whole, each of which may be told by itself
_ASCII: Final = 127


def stops_of(sampling: SamplingConfig) -> tuple[str, ...]:
    """The texts an engine is told to stop at: those that are passed on to it as they are take the others' place."""
    passed: Any = sampling.extra.get("stop")
    if not passed:
        return sampling.stop
    texts = [passed] if isinstance(passed, str) else passed if isinstance(passed, list | tuple) else []
    return tuple(text for text in texts if isinstance(text, str) and text)


def beginning(text: str, stops: Sequence[str]) -> bool:
    """Whether what follows could complete a stop text of which the beginning ends `text`."""
    if any(text.endswith(stop[:length]) for stop in stops for length in range(1, len(stop))):
        return True
    for half in range(1, _HALF + 1):
        if not text.endswith(_CUT * half):
            return False
        whole = text[:-half]
        if any(
            ord(character) > _ASCII and whole.endswith(stop[:place])
            for stop in stops
            for place, character in enumerate(stop)
        ):
            return True
    return False


def given_back(ids: Sequence[int], stops: Sequence[str], ways: Sequence[Decode], stands: int = 0) -> int:
    """How many of the last tokens of a cut turn are made again.

    Args:
        ids: what the model has made of the turn.
        stops: the texts that end it.
        ways: each makes text of some ids, as an engine may; none: nobody knows how.
        stands: tokens that an earlier call was given already: they are kept.
    """
    if not stops:
        return 0
    most = max(len(stop.encode(errors="replace")) for stop in stops) - 1
    free = max(0, len(ids) - stands)
    if not ways:
        return min(most, free)
    for back in range(free):
        end = len(ids) - back
        if not any(beginning(_end_of(ids, end, most, decode), stops) for decode in ways):
            return back
    return free


def _end_of(ids: Sequence[int], end: int, most: int, decode: Decode) -> str:
    """How the text of `ids[:end]` ends, longer than `most`: its last tokens alone, or more where some say nothing."""
    size = most + _HALF
    while True:
        size *= 2
        text = decode(ids[max(0, end - size) : end])
        if size >= end or len(text) > most + _HALF:
            return text
