"""What is to survive of a sample, as a value.

Invariant: nothing in it is changed once it is made, so that it may be written down by another thread later on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from rollout_svc.segment import FinishReason, Segment, VersionSpan, spans_of

__all__ = ["SampleState"]


class SampleState(NamedTuple):
    """A sample between two lives.

    Attributes:
        status: the JSON spelling of its status.
        attempt: its last attempt.
        failures: how often it failed.
        turn: the turn its loop had come to.
        segments: its tokens; empty once it is COMPLETED.
        packed: its record, JSON, once it is COMPLETED.
        length: response tokens in `packed`.
        spans: weight versions of those.
        meta: its own; None: that of its prompt.
        experts: routed experts of its first tokens, a NumPy array `(rows, moe_layers, top_k)`, uint8 or uint16; or what
            gives it when it is called, off the event loop.
        prompt_ids: of the conversation it had come to, where that is not its prompt's own.
        earlier: the conversations before that, as its record tells them; empty once it is COMPLETED.
        earlier_spans: weight versions of those in `packed`.
    """

    status: str = "INIT"
    attempt: int = 0
    failures: int = 0
    turn: int = 0
    resume_at: Literal["generate", "judge"] | None = None
    finish_reason: FinishReason | None = None
    engine_finish_reason: str | None = None
    segments: tuple[Segment, ...] = ()
    reward: float | None = None
    reward_parts: dict[str, float] | None = None
    packed: bytes | None = None
    length: int = 0
    spans: tuple[VersionSpan, ...] = ()
    meta: dict[str, Any] | None = None
    experts: Any = None
    prompt_ids: list[int] | None = None
    earlier: tuple[dict[str, Any], ...] = ()
    earlier_spans: tuple[tuple[VersionSpan, ...], ...] = ()

    def all_versions(self) -> Iterator[VersionSpan]:
        """Weight versions of every token the model made, for their age alone."""
        yield from self.spans
        for segment in self.segments:
            yield from segment.spans
        for spans in (*self.earlier_spans, *map(spans_of, self.earlier)):
            yield from spans

    def handed_back(self) -> SampleState:
        """The same after the end of everything that worked for it: what runs is aborted, its tokens are kept."""
        if self.status in ("GENERATED", "JUDGING"):
            return self._replace(status="ABORTED", resume_at="judge")
        if self.status == "GENERATING":
            if self.segments:
                return self._replace(status="ABORTED", resume_at="generate", finish_reason="abort")
            return SampleState(attempt=self.attempt, failures=self.failures)
        return self
