"""Weights in buckets through shared memory: the calls an engine with capability `shm` takes.

Pure: what is built here is carried out by whoever has the workers. The built-in engine speaks it
(`embedded/weight_routes.py`); SGLang names the first and the last call alike.

Invariant: whatever happens between `begin` and `end` changes no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Call

__all__ = ["CAPABILITY", "abandon", "begin", "bucket", "end"]

CAPABILITY: Final = "shm"


def begin(manifest: list[Any] | None, *, check_finite: bool) -> Call:
    """Open an update; with a manifest what will come is checked against the model, whole, before anything is sent."""
    body: dict[str, Any] = {"check_finite": check_finite}
    if manifest is not None:
        body["manifest"] = manifest
    return Call("POST", "/begin_weight_update", orjson.dumps(body), admin=True)


def bucket(call: Mapping[str, Any]) -> Call:
    """Have one bucket staged."""
    return Call("POST", "/update_weights_from_shared_memory", orjson.dumps(call), admin=True)


def end(version: int) -> Call:
    """Swap in what was staged, and label it."""
    return Call("POST", "/end_weight_update", orjson.dumps({"weight_version": str(version)}), admin=True)


def abandon() -> Call:
    """Forget what was staged."""
    return Call("POST", "/abandon_weight_update", b"{}", admin=True)
