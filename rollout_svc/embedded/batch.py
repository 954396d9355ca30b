"""The running batch: dense rows of the cache, advanced one token at a time.

Invariants:
- Running jobs occupy rows 0 to n - 1, in the order of `jobs`; a leaver's row is filled by the last one.
- A job's row holds the keys and values of its prompt and of all its output but the last token.
- After `remove` a row is free: nothing of a job that left is ever read again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollout_svc.embedded.decode import MIN_ROWS, CachedForward, padded_length
from rollout_svc.embedded.routing import RoutingTable
from rollout_svc.embedded.sampling import SamplingRows, draw_uniforms, sample
from rollout_svc.embedded.script import direct

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_svc.embedded.job import Job
    from rollout_svc.embedded.model import TinyTransformer


class Batch:
    """Up to `rows` jobs decoded together. Used from one thread, under `torch.inference_mode()`."""

    def __init__(self, model: TinyTransformer, rows: int) -> None:
        self.rows = rows
        self.jobs: list[Job] = []
        self._vocab_size = model.config.vocab_size
        self._forward = CachedForward(model, rows)
        self._uniforms = torch.zeros(self._forward.rows, model.config.context)
        self._routing = RoutingTable(model.config, self._forward.rows, padded_length(model.config.context))
        self._row_index = torch.arange(self._forward.rows)
        self._columns: tuple[Tensor, Tensor, SamplingRows] | None = None
        self._longest = 0

    def __repr__(self) -> str:
        return f"<Batch {len(self.jobs)}/{self.rows} rows>"

    @property
    def free(self) -> int:
        """Rows without a job."""
        return self.rows - len(self.jobs)

    def join(self, jobs: list[Job]) -> tuple[list[int], list[float]]:
        """Prefill sequences of one padded length into free rows, and draw each one's next token.

        A job that ran before is computed anew with its output so far, under the weights of now.

        Returns:
            For each job, its token and the token's log-probability.
        """
        first = len(self.jobs)
        logits, routing = self._forward.prefill([job.tokens for job in jobs], first)
        direct(logits, jobs)
        self._routing.prefilled(jobs, first, routing)
        for row, job in enumerate(jobs, start=first):
            places = len(job.prompt) + job.limit
            self._uniforms[row, :places] = draw_uniforms(job.sampling.seed, places)
        self.jobs += jobs
        self._columns = None
        lengths = torch.tensor([job.length for job in jobs])
        uniforms = self._uniforms[self._row_index[first : len(self.jobs)], lengths]
        ids, logprobs = sample(logits, SamplingRows.of([job.sampling for job in jobs], self._vocab_size), uniforms)
        return ids.tolist(), logprobs.tolist()

    def advance(self) -> tuple[list[int], list[float]]:
        """Feed every job its last token and draw the next.

        Returns:
            For each of `jobs`, its token and the token's log-probability.
        """
        ids, positions, settings = self._columns or self._stack()
        count = len(self.jobs)
        logits, routing = self._forward.decode(ids, positions, self._longest)
        direct(logits, self.jobs)
        self._routing.decoded(positions, routing)
        positions += 1
        self._longest += 1
        uniforms = self._uniforms[self._row_index[:count], positions[:count]]
        drawn, logprobs = sample(logits[:count], settings, uniforms)
        ids[:count] = drawn
        self._columns = (ids, positions, settings)
        return drawn.tolist(), logprobs.tolist()

    def remove(self, rows: list[int]) -> None:
        """Free the rows of jobs that have ended, moving the last rows into the gaps."""
        for row in sorted(rows, reverse=True):
            last = len(self.jobs) - 1
            self._routing.leave(self.jobs[row], row)
            if row != last:
                mover = self.jobs[last]
                self._forward.move(last, row, padded_length(mover.length))
                self._routing.move(last, row, mover.length)
                self._uniforms[row] = self._uniforms[last]
                self.jobs[row] = mover
            self.jobs.pop()
        if rows:
            self._columns = None

    def _stack(self) -> tuple[Tensor, Tensor, SamplingRows]:
        """Build the columns that `advance` keeps from step to step, after the batch has changed."""
        spare = [0] * max(0, MIN_ROWS - len(self.jobs))
        places = [job.length - 1 for job in self.jobs]
        self._longest = max(places)
        settings = SamplingRows.of([job.sampling for job in self.jobs], self._vocab_size)
        return torch.tensor([job.ids[-1] for job in self.jobs] + spare), torch.tensor(places + spare), settings
