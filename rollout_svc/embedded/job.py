"""One request inside the engine, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from rollout_svc.embedded.sampling import Sampling

Stage = Literal["waiting", "running"]


class Span(TypedDict):
    """Output tokens `start` to `end` (exclusive) were made by the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way; only the engine's thread writes to it once it is submitted.

    Attributes:
        rid: The request's id.
        prompt: Token ids, at least one, fewer than the context.
        sampling: How to continue.
        limit: Most output tokens, already within the context.
        stop_ids: Ids that end the output, the end token included unless ignored.
        tag: Whatever the submitter wants to find again with the outcome.
        ids: Output so far.
        logprobs: One for each of `ids`.
        marks: `(version, first output token)` for each label it ran under; empty until it has run.
    """

    rid: str
    prompt: list[int]
    sampling: Sampling
    limit: int
    stop_ids: frozenset[int] = frozenset()
    tag: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[str, int]] = field(default_factory=list)

    def spans(self) -> list[Span]:
        """Return the non-empty spans of versions, in order, covering the whole output."""
        ends = [start for _, start in self.marks[1:]] + [len(self.ids)]
        found: list[Span] = []
        for (version, start), end in zip(self.marks, ends, strict=True) if self.marks else ():
            if found and found[-1]["version"] == version:
                found[-1]["end"] = end
            elif end > start:
                found.append({"version": version, "start": start, "end": end})
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A request's end.

    Attributes:
        job: The request, with its output.
        finish_reason: As on the wire: a dict with `type` "stop", "length" or "abort".
        stage: Where it was when it ended; "waiting" when it never ran.
        version: The label of the weights at that moment.
    """

    job: Job
    finish_reason: dict[str, Any]
    stage: Stage
    version: str
