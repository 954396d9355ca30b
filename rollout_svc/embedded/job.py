"""One request inside the engine, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_svc.embedded.sampling import Sampling
    from rollout_svc.embedded.script import Scripted

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
        retractions: How often it was put back in the queue.
        doomed: Aborted while frozen in its row: it ends when the freeze does.
        wants_routing: Whether to keep the routing of its tokens when it leaves its row.
        routing: int32[rows, layers, top_k] when it has left its row; see `routing.py`. None: it never ran, or the model
            has no experts, or nobody asked.
        script: What it is to say; None: whatever the model does.
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
    retractions: int = 0
    doomed: bool = False
    wants_routing: bool = False
    routing: Tensor | None = None
    script: Scripted | None = None

    @property
    def tokens(self) -> list[int]:
        """The sequence so far: prompt, then output."""
        return self.prompt + self.ids

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return len(self.prompt) + len(self.ids)

    def spans(self, count: int | None = None) -> list[Span]:
        """Return the non-empty spans of versions, in order, covering the output.

        Args:
            count: Cover only so many output tokens; None for all. A mark is set before the token it stands for, so
                that the spans of tokens that were there before the call are right even while the job runs.
        """
        count = len(self.ids) if count is None else count
        marks = list(self.marks)
        ends = [start for _, start in marks[1:]] + [count]
        found: list[Span] = []
        for (version, start), end in zip(marks, ends, strict=True) if marks else ():
            end = min(end, count)  # noqa: PLW2901 - a later mark may stand beyond what is asked for
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
        stage: Where it was when it ended; "waiting" when it never ran, or was put back in the queue.
        version: The label of the weights at that moment.
    """

    job: Job
    finish_reason: dict[str, Any]
    stage: Stage
    version: str
