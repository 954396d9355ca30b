"""What the engines behind one worker say, made into one answer: pure.

Invariants:

- One unknown makes a sum unknown; a number is never made up.
- What has to be the same everywhere and is not is said, engine by engine, never averaged or guessed.
- The worker can do what every one of its engines can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from rollout_svc.engines import EngineInfo, EngineProfile
from rollout_svc.errors import WorkerFailure

__all__ = ["INCOMPLETE", "merged_failure", "merged_info", "merged_profile", "total"]

INCOMPLETE: Final = "incomplete"
"""The kind of failure where some engines answered, and some did not: requests may still be answered by the others."""

_FINAL: Final = ("unauthorized", "forbidden", "not_found", "unfit")  # it answers, and waiting does not help
_SAME: Final = ("tokenizer", "vocab_size", "logprobs")  # of a profile: of samples that are trained on together
_LOST_BY_ROUTING: Final = frozenset({"experts"})  # the router drops what asks for them


def total(counts: Collection[int | None]) -> int | None:
    """Sum the engines' counts; None where one is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def merged_failure(failures: Mapping[str, WorkerFailure], engines: int) -> WorkerFailure:
    """Make one failure of those of some engines, each named.

    Args:
        failures: by engine, at least one.
        engines: how many were asked.

    Returns:
        Of the kind that waiting cannot help, if there is one; `wrong_dialect` where nothing else is wrong; else
        `incomplete`, or the first's own kind where every engine failed. `accepted` unless one was refused for certain;
        it `lingers` where it may at any of them.
    """
    parts = list(failures.values())
    final = next((failure for failure in parts if failure.kind in _FINAL), None)
    other = next((failure for failure in parts if failure.kind != "wrong_dialect"), None)
    if final is not None:
        kind = final.kind
    elif other is None:
        kind = "wrong_dialect"
    else:
        kind = INCOMPLETE if len(parts) < engines else other.kind
    said = {url: part.message if part.kind == kind else str(part) for url, part in failures.items()}
    words = "; ".join(message if url in message else f"{url}: {message}" for url, message in said.items())
    waits = [failure.retry_after_s for failure in parts if failure.retry_after_s is not None]
    return WorkerFailure(
        kind,
        words,
        retry_after_s=max(waits, default=None),
        hard=any(failure.hard for failure in parts),
        accepted=all(failure.accepted for failure in parts),
        lingers=any(failure.lingers for failure in parts),
    )


def merged_info(infos: Mapping[str, EngineInfo]) -> EngineInfo:
    """Make one label of the engines': theirs where they agree, else none, with what each said; likewise the process."""
    labels = {url: info.weight_label for url, info in infos.items()}
    processes = [info.process for info in infos.values() if info.process is not None]
    process = " ".join(processes) if len(processes) == len(infos) else None
    half_loaded = any(info.half_loaded for info in infos.values())
    first, *others = labels.values()
    if all(label == first for label in others):
        return EngineInfo(first, process, half_loaded)
    return EngineInfo(None, process, half_loaded, differing=tuple(labels.items()))


def merged_profile(profiles: Mapping[str, EngineProfile]) -> EngineProfile:
    """Make one profile of the engines'.

    The model has to be the same only where the weights are: an update from disk changes the name an engine gives it, so
    one that was restarted since differs until its weights are brought to it. Of paths only the last part counts, for
    machines differ; what an engine does not tell is not held against it.

    Raises:
        WorkerFailure: `unfit`: they differ in what has to be the same for samples that are trained on together.
    """
    each = tuple(profiles.values())
    labels = merged_info({url: EngineInfo(profile.weight_label) for url, profile in profiles.items()})
    for name in _SAME if labels.differing else ("model", *_SAME):
        said = {url: getattr(profile, name) for url, profile in profiles.items()}
        if len({_last_part(value) for value in said.values() if value is not None}) > 1:
            words = ", ".join(f"{url} has {value}" for url, value in said.items())
            raise WorkerFailure("unfit", f"the engines behind it disagree on {name}: {words}", hard=True)
    shared = frozenset.intersection(*(frozenset(profile.capabilities) for profile in each)) - _LOST_BY_ROUTING
    versions = list(dict.fromkeys(profile.engine_version for profile in each))
    known_versions = [version for version in versions if version is not None]
    warnings = [f"{url}: {warning}" for url, profile in profiles.items() for warning in profile.warnings]
    if len(versions) > 1:
        warnings.append(f"the engines behind it have different versions: {', '.join(map(str, versions))}")
    return replace(
        each[0],
        engine_version=", ".join(known_versions) or None,
        capabilities=tuple(name for name in each[0].capabilities if name in shared),
        warnings=tuple(warnings),
        weight_label=labels.weight_label,
        context=_smallest([profile.context for profile in each]),
        max_running=_smallest([profile.max_running for profile in each]),
    )


def _last_part(value: str | int) -> str | int:
    return PurePosixPath(value).name if isinstance(value, str) else value


def _smallest(values: Sequence[int | None]) -> int | None:
    """The bound that holds for all; unknown where one is."""
    known = [value for value in values if value is not None]
    return min(known) if len(known) == len(values) else None
