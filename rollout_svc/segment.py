"""Tokens as they came: what one engine call made, under which weights, and how it ended.

Invariant: values; nothing here is changed once it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["FinishReason", "Segment", "VersionSpan", "joined_spans", "spans_of"]

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class VersionSpan(NamedTuple):
    """Tokens `[start, end)` were made under `version`; None where nobody knows.

    `confirmed` is false where the engine reports no versions: it is the one the request was dispatched under.
    """

    version: int | None
    start: int
    end: int
    confirmed: bool = True

    def as_json(self) -> dict[str, int | bool | None]:
        """Return the record of the contract; `confirmed` only where it is false."""
        record: dict[str, int | bool | None] = {"version": self.version, "start": self.start, "end": self.end}
        return record if self.confirmed else record | {"confirmed": False}


class Segment(NamedTuple):
    """Tokens of one engine call, or tokens an agent put between two calls; a tuple, which is made in no time.

    Attributes:
        ids: token ids, in order.
        logprobs: natural log of the probability the engine gave each token; 0.0 where `by_model` is false.
        spans: weight versions over this segment, indexed from its own first token.
        by_model: false for environment and tool tokens: mask 0, no logprob.
        turn: which turn of the conversation the tokens belong to, from 0.
    """

    ids: list[int]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    by_model: bool = True
    turn: int = 0

    def first(self, count: int) -> Segment:
        """The first `count` tokens of it, with what belongs to them."""
        spans = tuple(span._replace(end=min(span.end, count)) for span in self.spans if span.start < count)
        return self._replace(ids=self.ids[:count], logprobs=self.logprobs[:count], spans=spans)


def spans_of(record: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    """Weight versions as the record of a conversation tells them."""
    return tuple(
        VersionSpan(span["version"], span["start"], span["end"], span.get("confirmed", True))
        for span in record["weight_versions"]
    )


def joined_spans(segments: Sequence[Segment]) -> tuple[VersionSpan, ...]:
    """Weight versions over the tokens of all segments in order; neighbours that differ in nothing are one."""
    if len(segments) == 1 and len(segments[0].spans) == 1:
        return segments[0].spans
    joined: list[VersionSpan] = []
    offset = 0
    for segment in segments:
        for span in segment.spans:
            moved = span._replace(start=span.start + offset, end=span.end + offset)
            last = joined[-1] if joined else None
            if last is None or (last.version, last.confirmed, last.end) != (span.version, span.confirmed, moved.start):
                joined.append(moved)
            else:
                joined[-1] = last._replace(end=moved.end)
        offset += len(segment.ids)
    return tuple(joined)
