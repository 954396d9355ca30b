"""Routed experts for tests: arrays that tell whose they are, and samples that have them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.prompt import Prompt
from rollout_svc.sample import Sample, SampleStatus
from rollout_svc.tensors import Handle, Handles, MemoryStore
from tests.support.groups import make_prompt, segment

__all__ = ["LAYERS", "TOP_K", "own", "ready_group", "routing"]

LAYERS, TOP_K = 3, 2


def routing(
    name: str, rows: int, dtype: str = "uint8", layers: int = LAYERS, top_k: int = TOP_K
) -> np.ndarray[Any, Any]:
    """Make routed experts `(rows, layers, top_k)`: row t is the same however many rows there are."""
    count = 200 if dtype == "uint8" else 1000
    start = zlib.crc32(name.encode()) % count
    flat = (np.arange(rows * layers * top_k) * 7 + start) % count
    made: np.ndarray[Any, Any] = flat.astype(dtype).reshape(rows, layers, top_k)
    return made


def own(handles: Handles, array: np.ndarray[Any, Any], holder: str = "a test") -> Handle:
    """Put an array into memory, and own it."""
    return handles.hold(MemoryStore().put(array), kind="experts", holder=holder)


def complete(sample: Sample, ids: list[int], experts: Handle | None) -> None:
    """Bring a fresh sample to COMPLETED with these tokens."""
    attempt = sample.hand_out()
    sample.extend(attempt, segment(ids), experts)
    sample.transition(attempt, SampleStatus.GENERATED)
    sample.transition(attempt, SampleStatus.JUDGING)
    sample.grade(attempt, 1.0, {})


def ready_group(
    ledger: Ledger,
    handles: Handles,
    group_id: str,
    *,
    size: int = 2,
    tokens: int = 4,
    routed: bool = True,
    dtype: str = "uint8",
    prompt: Prompt | None = None,
    layers: int = LAYERS,
    top_k: int = TOP_K,
) -> Group:
    """Make a ready group, each sample with the routing of all its tokens; member n has n tokens more."""
    group = Group(group_id=group_id, prompt=prompt or make_prompt(), size=size, lane="train", ledger=ledger)
    group.start()
    for sample in group.samples:
        ids = [5] * (tokens + sample.index)
        rows = len(group.prompt.input_ids) + len(ids) - 1
        experts = routing(sample.sample_id, rows, dtype, layers, top_k) if routed else None
        complete(sample, ids, None if experts is None else own(handles, experts, sample.sample_id))
    group.finish(1.0)
    return group
