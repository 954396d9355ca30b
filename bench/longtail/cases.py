"""What is measured: strategies by waves by staleness, three figures each.

Waves are how often a batch fills the slots: `slots = batch * 8 / waves`. One is an engine with a slot for each sample
of a batch, eight is one that runs an eighth of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

from bench.longtail.trace import CUT, GROUP_SIZE, MEAN_TOKENS
from rollout_svc.config import (
    Config,
    ProducerConfig,
    PromptsConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    WorkerConfig,
)
from rollout_svc.config.settings import Strategy as Scheduling

__all__ = ["BATCH", "CASES", "CELLS", "MEASURES", "STALENESS", "STRATEGIES", "TASK", "WAVES", "Cell", "Strategy"]

BATCH: Final = 16
"""Groups of a batch."""
OVER_SAMPLE: Final = 0.2
"""The service's default: four groups more than a batch, for the strategies that oversample."""
TASK: Final = "trace"
_NEVER: Final = 100
"""Steps that no answer takes."""
TAIL_BATCH: Final = 8
"""Groups that gather before they go first."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to schedule.

    Attributes:
        name: as the cases spell it.
        scheduling: `producer.strategy`.
        partial: `tasks[].partial_rollout`.
        tail: whether there is a tail batch.
        ageless: S bounds the window alone: nothing is old enough to expire. None of the cases is.
    """

    name: str
    scheduling: Scheduling
    partial: bool = True
    tail: bool = False
    ageless: bool = False

    @property
    def colocated(self) -> bool:
        """Whether the trainer has the engines' machines while it trains."""
        return self.scheduling != "disaggregated"


STRATEGIES: Final = (
    Strategy("sync", "sync", partial=False),
    Strategy("async", "async", partial=False),
    Strategy("async+partial", "async"),
    Strategy("async+partial+tail", "async", tail=True),
    Strategy("disaggregated+partial", "disaggregated"),
)
WAVES: Final = (1, 2, 4, 8)
STALENESS: Final = (1, 2, 4, 8)
MEASURES: Final = ("use", "rate", "long")


@dataclass(frozen=True, slots=True)
class Cell:
    """A strategy on an engine of a size, under a bound."""

    strategy: Strategy
    waves: int
    staleness: int

    @property
    def slots(self) -> int:
        """Of the one engine."""
        return BATCH * GROUP_SIZE // self.waves

    def case(self, measure: str) -> str:
        """The name of one of its figures."""
        return f"{measure}-{self.strategy.name}-w{self.waves}-s{self.staleness}"

    def config(self, url: str) -> Config:
        """The service's settings."""
        return Config(
            workers=(WorkerConfig(url=url, dialect="sglang"),),
            request_timeout_s=100_000.0,
            tasks=(
                TaskConfig(
                    name=TASK,
                    prompts=PromptsConfig(push=True),
                    sampling=SamplingConfig(max_tokens=CUT * MEAN_TOKENS, seed=0),
                    partial_rollout=self.strategy.partial,
                    max_groups=BATCH * (self.staleness + 1) if self.strategy.ageless else None,
                ),
            ),
            trainer=TrainerConfig(
                train_batch_size=BATCH,
                prompt_repeat_k=GROUP_SIZE,
                over_sample_threshold=OVER_SAMPLE,
                max_batch_per_worker=self.slots,
                max_staleness=_NEVER if self.strategy.ageless else self.staleness,
            ),
            producer=ProducerConfig(
                strategy=self.strategy.scheduling, tail_batch_size=TAIL_BATCH if self.strategy.tail else None
            ),
        )


CELLS: Final = tuple(Cell(*values) for values in product(STRATEGIES, WAVES, STALENESS))
CASES: Final = tuple(cell.case(measure) for measure in MEASURES for cell in CELLS)
