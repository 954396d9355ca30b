"""What the arguments of a call are as the body of the control API: the same over HTTP and to an actor.

Invariants:

- Pure, and nothing is judged here: what is no list, no record, or out of bounds goes on as it is, for the models of
  `bodies` to refuse with the path of its field. A mistake is the same error either way.
- A key is in a body only where something was given for it: what is not said is as configured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["batch", "checkpoint", "evaluation", "given", "prompts", "weights", "worker"]

Json = dict[str, Any]


def given(**arguments: Any) -> Json:
    """The arguments that were given, as JSON has them; for `pause`, `resume`, `stuck` and `set_concurrency`."""
    return {
        name: list(value) if isinstance(value, (tuple, set, frozenset)) else value
        for name, value in arguments.items()
        if value is not None
    }


def batch(step: int, groups: int, timeout_s: float, ack: Any) -> Json:
    """For `take_batch`."""
    return {"step": step, "groups": groups, "timeout_s": timeout_s} | _acked(ack)


def prompts(task: str, lines: Any) -> Json:
    """For `put_prompts`."""
    return {"task": task, "prompts": _listed(lines)}


def checkpoint(path: str, step: int, ack: Any) -> Json:
    """For `checkpoint`."""
    return {"path": path, "step": step} | _acked(ack)


def evaluation(task: str, lines: Any, *, sampling: Any, version: int | None, timeout_s: float) -> Json:
    """For `evaluate`."""
    return prompts(task, lines) | {"timeout_s": timeout_s} | given(sampling=sampling, version=version)


def weights(version: int, source: Any, *, pause: Any, force: bool) -> Json:
    """For `update_weights`."""
    forced = {} if force is False else {"force": force}
    return {"version": version, "source": _plain(source)} | given(pause=pause) | forced


def worker(url: str | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Json:
    """For `add_worker`: a worker's keys in the configuration, some of them or all at once in place of the address."""
    return {**(url if isinstance(url, Mapping) else given(url=url)), **settings}


def _acked(ack: Any) -> Json:
    ids = _listed(ack)
    return {} if ids == [] else {"ack": ids}


def _listed(value: Any) -> Any:
    """As a list of plain values what is given as one; what is none stays as it is."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return value
    return [_plain(one) for one in value]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
