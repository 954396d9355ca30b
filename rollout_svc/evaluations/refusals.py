"""Why an evaluation has no answer: pure.

Invariant: each says how far it got, so that a caller knows what more time, or other weights, would have to bring.
"""

from __future__ import annotations

from typing import Any

from rollout_svc.errors import Conflict, NotNow
from rollout_svc.evaluations.evaluation import Evaluation

__all__ = ["out_of_time", "weights_moved"]


def out_of_time(evaluation: Evaluation, oldest: list[dict[str, Any]], *, paused: bool, in_traffic: bool) -> NotNow:
    """The time is up: what is there, what is missing, and what that waits for.

    Args:
        evaluation: it.
        oldest: records of its prompts that are under way longest.
        paused: its lane is closed.
        in_traffic: a worker is in traffic.
    """
    waits_for = "gate_closed" if paused else "" if in_traffic else "no_worker"
    detail = {
        "finished": evaluation.finished,
        "failed": evaluation.failed,
        "wanted": evaluation.wanted,
        "weight_version": evaluation.version,
        "waiting_for": waits_for,
        "oldest": oldest,
    }
    why = "lane eval is paused" if paused else "no worker is in traffic" if waits_for else "the time is up"
    message = f"{evaluation.finished} of {evaluation.wanted} prompts are finished: {why}"
    return NotNow("paused" if paused else "not_enough", message, detail=detail)


def weights_moved(evaluation: Evaluation, version: int) -> Conflict:
    """The fleet went to another version than the one it is of: its tokens are of no use any more."""
    finished, wanted = evaluation.finished, evaluation.wanted
    detail = {"version": evaluation.version, "weight_version": version, "finished": finished, "wanted": wanted}
    message = f"the weights moved from version {evaluation.version} to {version}"
    return Conflict(f"{message}: {finished} of {wanted} prompts were finished", type="version_changed", detail=detail)
