"""How many requests to keep running: concurrency from what the trainer consumes.

Invariants:

- Pure: numbers in, a frozen plan out.
- Everything is counted in requests (one per running sample); only `max_groups` counts groups.
- No worker is asked for more than it is allowed: `limit_of(worker) >= required`, except where a limit was set by hand.
- Nothing is adjusted in silence: every number that differs from the settings has a warning with both numbers.
- Products are exact: fractions are taken as they are written, so that 10 * 1.1 is 11, not 12.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor
from typing import Any

from rollout_svc.config import TrainerConfig
from rollout_svc.errors import ConfigError, Problem

__all__ = ["Plan", "batch_of", "check_open_files", "make_plan"]

MAX_REQUESTS_PER_WORKER = 1_000_000
"""Requests: beyond this a plan is a mistake in the settings, whatever the machine."""
RESERVED_FILES = 256
"""Files: the interpreter, logs, prompt files, and the control API's own clients."""
FILES_PER_WORKER = 4
"""Files: the control connections of a worker, and room for one that is being replaced."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The concurrency in force."""

    workers: int
    """Workers the plan was made for."""
    required: int
    """Requests each worker should be running: the producer's target."""
    allowed: int
    """Requests a worker may be running: the smallest limit of all workers; 0 without workers."""
    ratio: float
    """Requests allowed, as a multiple of what the smallest worker runs at once."""
    max_groups: int
    """Groups that may be admitted and not yet consumed."""
    warnings: tuple[str, ...] = ()
    """What was adjusted, with the numbers before and after."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Requests allowed, by worker."""

    def limit_of(self, worker_id: str) -> int:
        """Return the requests this worker may be running; a worker the plan does not know gets the smallest limit."""
        return self.limits.get(worker_id, self.allowed)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as the control API and `plan --json` show it."""
        return {
            "workers": self.workers,
            "required": self.required,
            "allowed": self.allowed,
            "ratio": self.ratio,
            "max_groups": self.max_groups,
            "warnings": list(self.warnings),
        }


def batch_of(max_batch: int | None, engines: int, trainer: TrainerConfig) -> int | None:
    """Requests a worker runs at once, where `max_batch` is what each of its engines does.

    Args:
        max_batch: Requests one engine runs at once; null: `trainer.max_batch_per_worker`.
        engines: Engines behind the worker, at least 1.
        trainer: Where the default is.

    Returns:
        Null where the default holds as it is.
    """
    if engines <= 1:
        return max_batch
    return engines * (trainer.max_batch_per_worker if max_batch is None else max_batch)


def make_plan(
    trainer: TrainerConfig,
    max_batches: Mapping[str, int | None] | Sequence[int | None],
    limits: Mapping[str, int] | None = None,
    *,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Make the plan for a fleet.

    Args:
        trainer: What the trainer consumes.
        max_batches: Requests each worker runs at once, by worker id or in order (ids are then `0`, `1`, …);
            null: `trainer.max_batch_per_worker`.
        limits: Limits set by hand, by worker id; they hold as they are, even below what is required.
        notes: What else was adjusted, said with the plan's own warnings.

    Raises:
        ConfigError: If the settings ask for an impossible number of requests, or a limit names no worker.
    """
    batches = dict(max_batches) if isinstance(max_batches, Mapping) else {str(i): b for i, b in enumerate(max_batches)}
    sizes = {name: trainer.max_batch_per_worker if batch is None else batch for name, batch in batches.items()}
    limits = limits or {}
    _check(sizes, limits)
    over = 1 + _exact(trainer.over_sample_threshold)
    max_groups = ceil(trainer.train_batch_size * over) * (1 + trainer.max_staleness)
    if not sizes:
        warning = "no workers: nothing is started until one is added"
        return Plan(0, 0, 0, trainer.allow_over_concurrency_ratio, max_groups, (*notes, warning))
    required = _required(trainer, len(sizes))
    ratio = trainer.allow_over_concurrency_ratio
    allowed_of = {size: ceil(size * _exact(ratio)) for size in set(sizes.values())}  # fractions are slow, sizes few
    allowed = {name: allowed_of[size] for name, size in sizes.items()}
    warnings: list[str] = [*notes]
    short = [name for name in sizes if name not in limits and allowed[name] < required]
    if short:
        smallest = min(short, key=sizes.__getitem__)
        raised = _ratio_for(required, sizes[smallest])
        warnings.append(
            f"{allowed[smallest]} requests allowed per worker, {required} required: allow_over_concurrency_ratio "
            f"raised from {ratio:g} to {raised:g} ({len(short)} of {len(sizes)} workers)"
        )
        ratio = raised
        allowed.update(dict.fromkeys(short, required))
    allowed.update(limits)
    warnings += [
        f"worker {name}: limit set to {limit} requests, {required} required"
        for name, limit in limits.items()
        if limit < required
    ]
    smallest_limit = min(allowed.values())
    return Plan(len(sizes), required, smallest_limit, ratio, max_groups, tuple(warnings), allowed)


def _required(trainer: TrainerConfig, workers: int) -> int:
    over = 1 + _exact(trainer.over_sample_threshold)
    required = ceil(trainer.train_batch_size * trainer.prompt_repeat_k * over / workers)
    if required > MAX_REQUESTS_PER_WORKER:
        raise ConfigError.at(
            "trainer.train_batch_size",
            f"{trainer.train_batch_size} groups of {trainer.prompt_repeat_k} samples, {float(over):g} times over, on "
            f"{workers} workers are {required} requests per worker; at most {MAX_REQUESTS_PER_WORKER} are possible",
        )
    return required


def check_open_files(plan: Plan, soft: int, hard: int) -> int:
    """Return the soft limit on open files that the plan needs: `soft` itself where it suffices.

    Args:
        plan: The plan; each request it allows holds one connection.
        soft: The limit in force; negative: none.
        hard: The limit up to which `soft` may be raised; negative: none.

    Raises:
        ConfigError: If the plan needs more than `hard`.
    """
    requests = sum(plan.limits.values())
    needed = requests + FILES_PER_WORKER * plan.workers + RESERVED_FILES
    if soft < 0 or needed <= soft:
        return soft
    if 0 <= hard < needed:
        raise ConfigError.at(
            "trainer",
            f"the plan needs {needed} open files ({requests} requests on {plan.workers} workers, and "
            f"{needed - requests} for everything else), the hard limit is {hard}",
        )
    return needed


def _check(sizes: Mapping[str, int], limits: Mapping[str, int]) -> None:
    problems = [
        Problem(f"limits.{name}", "no such worker" if name not in sizes else f"expected at least 1, not {limit}")
        for name, limit in limits.items()
        if name not in sizes or limit < 1
    ]
    problems += [
        Problem(f"workers.{name}.max_batch", f"expected at least 1, not {size}")
        for name, size in sizes.items()
        if size < 1
    ]
    if problems:
        raise ConfigError(problems)


def _exact(number: float) -> Fraction:
    """Take a number as it is written, not as it is stored."""
    return Fraction(repr(number))


def _ratio_for(required: int, size: int) -> float:
    """Return the shortest decimal ratio r with ceil(size * r) == required."""
    digits = 0
    while True:
        ratio = float(Fraction(floor(Fraction(required, size) * 10**digits), 10**digits))
        if ceil(size * _exact(ratio)) == required:
            return ratio
        digits += 1
