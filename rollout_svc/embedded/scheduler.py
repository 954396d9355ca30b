"""The scheduler: a queue, a running batch, and what happens between two steps.

Invariants:
- Every submitted job leaves through exactly one `Outcome`.
- New jobs join, aborts take effect, and labels and weights change only between steps, never within one. A step that
  is given up for such a change ends early: what it has not done yet, a later one does.
- No job waits while a row is free, unless this step's prefill budget is spent; jobs start in the order they came.
- With nothing running and nothing waiting, every row is free.
- While frozen no step is taken: rows keep their jobs, keys and values, the queue its order. An abort of a job in a row
  then waits for the thaw, as it does for an engine whose aborts take a step; one in the queue ends at once.
- While memory is `released` no step is taken either, and no row has a job: newcomers wait in the queue.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.embedded.batch import Batch
from rollout_svc.embedded.decode import GivenUpError, padded_length
from rollout_svc.embedded.job import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout_svc.embedded.job import Job, Stage
    from rollout_svc.embedded.model import TinyTransformer
    from rollout_svc.embedded.tokens import Vocabulary

FIRST_VERSION: Final = "default"
"""The label of weights that nobody has labelled."""

PREFILL_TOKENS: Final = 2048
"""Padded prompt tokens taken in at one step: bounds how long running jobs, and aborts, wait for newcomers."""

PREFILL_WORK: Final = 2**33
"""Tokens times parameters taken in at one step, of models for which that is fewer tokens: some tenths of a second on
one core. One prompt is taken in any case."""


class Scheduler:
    """Runs jobs on one model. Used from one thread, under `torch.inference_mode()`.

    Attributes:
        given_up: Whether the step under way is to end early; while it says so no step does anything.
    """

    def __init__(self, model: TinyTransformer, vocabulary: Vocabulary, *, max_running: int) -> None:
        self.model = model
        self.version = FIRST_VERSION
        self.given_up: Callable[[], bool] = lambda: False
        self.batch = Batch(model, max_running, lambda: self.given_up())  # noqa: PLW0108 - another may be set
        self.waiting: deque[Job] = deque()
        self.frozen = False
        self.released: frozenset[str] = frozenset()
        self.generated_tokens = 0
        self._vocabulary = vocabulary
        self._ended: list[Outcome] = []
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._prefill_tokens = min(PREFILL_TOKENS, PREFILL_WORK // parameters)

    def __repr__(self) -> str:
        state = "frozen" if self.frozen else "going"
        load = f"running={len(self.batch.jobs)} waiting={len(self.waiting)}"
        return f"<Scheduler {state} {load} version={self.version!r}>"

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return not self.frozen and not self.released and bool(self.batch.jobs or self.waiting)

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue; one that may produce nothing ends here."""
        if job.limit < 1:
            self._ended.append(Outcome(job, {"type": "length", "length": 0}, "running", self.version))
        else:
            self.waiting.append(job)

    def abort(self, chosen: Callable[[Job], bool]) -> int:
        """End the chosen jobs, with what they have: now, but those frozen in a row at the thaw.

        Returns:
            How many were chosen.
        """
        if not self.frozen:
            return self.end(chosen)
        doomed = [job for job in self.batch.jobs if chosen(job)]
        for job in doomed:
            job.doomed = True
        return len(doomed) + self._end_waiting(chosen)

    def end(self, chosen: Callable[[Job], bool]) -> int:
        """End the chosen jobs now, with what they have, frozen or not.

        Returns:
            How many were ended.
        """
        ended = self._end_waiting(chosen)
        rows = [row for row, job in enumerate(self.batch.jobs) if chosen(job)]
        running = [self.batch.jobs[row] for row in rows]
        self.batch.remove(rows)
        for job in running:
            reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            self._end(job, reason, "running")
        return ended + len(running)

    def freeze(self) -> None:
        """Take no step until `thaw`. Idempotent."""
        self.frozen = True

    def retract(self) -> None:
        """Freeze with every row free: what ran goes to the head of the queue, to be computed anew. Idempotent.

        Aborts that waited for the thaw take effect.
        """
        self.freeze()
        jobs = list(self.batch.jobs)
        self.batch.remove(list(range(len(jobs))))
        for job in jobs:
            job.retractions += 1
        self.waiting.extendleft(reversed(jobs))
        self._end_waiting(lambda job: job.doomed)

    def thaw(self) -> None:
        """Take steps again, after ending what was aborted in its row. Idempotent."""
        self.frozen = False
        self.end(lambda job: job.doomed)

    def _end_waiting(self, chosen: Callable[[Job], bool]) -> int:
        waiting = [job for job in self.waiting if chosen(job)]
        if waiting:
            gone = set(map(id, waiting))
            self.waiting = deque(job for job in self.waiting if id(job) not in gone)
        for job in waiting:
            self._end(job, {"type": "abort", "message": "Abort in waiting queue"}, "waiting")
        return len(waiting)

    def relabel(self, version: str) -> None:
        """Name the weights; the next token of every job belongs to the new name."""
        self.version = version
        for job in self.batch.jobs:
            job.marks.append((version, len(job.ids)))

    def step(self) -> None:
        """Take newcomers in, then advance every running job by one token; less where it is given up."""
        came = list(islice(self.waiting, self.batch.free))
        groups = self._newcomers()
        try:
            while groups:
                first = len(self.batch.jobs)
                drawn = self.batch.join(groups[0])
                jobs = groups.pop(0)
                for job in jobs:
                    job.marks.append((self.version, len(job.ids)))
                self._append(jobs, *drawn, first)
            if self.batch.jobs:
                self._append(self.batch.jobs, *self.batch.advance(), 0)
        except GivenUpError:
            left = {id(job) for jobs in groups for job in jobs}
            self.waiting.extendleft(job for job in reversed(came) if id(job) in left)

    def take_ended(self) -> list[Outcome]:
        """Hand over the outcomes that have come about since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _newcomers(self) -> list[list[Job]]:
        """Take jobs off the queue, as many as rows and budget allow, in groups of one padded length."""
        groups: dict[int, list[Job]] = {}
        budget = self._prefill_tokens
        for job in list(islice(self.waiting, self.batch.free)):
            length = padded_length(job.length)
            if groups and length > budget:
                break
            budget -= length
            groups.setdefault(length, []).append(self.waiting.popleft())
        return list(groups.values())

    def _append(self, jobs: list[Job], ids: list[int], logprobs: list[float], first_row: int) -> None:
        """Record one new token for each job, and end those it completes."""
        self.generated_tokens += len(ids)
        done: list[tuple[int, Job, dict[str, Any]]] = []
        for row, (job, token, logprob) in enumerate(zip(jobs, ids, logprobs, strict=True), start=first_row):
            job.ids.append(token)
            job.logprobs.append(logprob)
            if token in job.stop_ids:
                done.append((row, job, {"type": "stop", "matched": token}))
            elif job.sampling.stop and (matched := self._matched(job)) is not None:
                done.append((row, job, {"type": "stop", "matched": matched}))
            elif len(job.ids) >= job.limit:
                done.append((row, job, {"type": "length", "length": len(job.ids)}))
        if done:
            self.batch.remove([row for row, _, _ in done])
            for _, job, reason in done:
                self._end(job, reason, "running")

    def _matched(self, job: Job) -> str | None:
        """Return the stop string that the last token has completed, if it has."""
        # A match that the last token completed lies within as many tokens as it has bytes, and that token.
        reach = max(len(stop.encode()) for stop in job.sampling.stop) + 1
        tail = self._vocabulary.decode(job.ids[-reach:], skip_special_tokens=job.sampling.skip_special_tokens)
        return next((stop for stop in job.sampling.stop if stop in tail), None)

    def _end(self, job: Job, reason: dict[str, Any], stage: Stage) -> None:
        self._ended.append(Outcome(job, reason, stage, self.version))
