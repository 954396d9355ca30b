"""What a caller asks for when it asks for new weights, checked before anything is stopped.

Invariant: pure; a request that passed can be carried out or fails for a reason that lies with the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollout_svc.engines import Endpoint
from rollout_svc.errors import BadRequest, Conflict
from rollout_svc.gate import LANES, Lane
from rollout_svc.weights.fleet import Source

__all__ = ["read_source", "read_version", "refuse_undrained"]


def read_version(version: object) -> int:
    """Read which weights they are; raises BadRequest."""
    if type(version) is not int or version < 0:
        raise BadRequest.at("version", f"expected a whole number from 0, not {version!r}")
    return version


def read_source(given: Mapping[str, Any]) -> Source:
    """Read where weights come from; raises BadRequest at the field that is wrong."""
    kind, path, workers = given.get("kind"), given.get("path"), given.get("workers")
    if kind == "disk":
        if not isinstance(path, str) or not path:
            raise BadRequest.at("source.path", "needed for kind 'disk'")
        return Source(kind, path)
    if kind == "shm":
        return Source(kind, publisher=_publisher(given))
    if kind != "external":
        told = f"{kind!r} is not supported by this version; use 'disk', 'shm' or 'external'"
        raise BadRequest.at("source.kind", told)
    if workers is None:
        return Source(kind)
    if not isinstance(workers, list | tuple) or not all(isinstance(name, str) for name in workers):
        raise BadRequest.at("source.workers", "expected a list of worker ids")
    return Source(kind, workers=frozenset(workers))


def _publisher(given: Mapping[str, Any]) -> Endpoint:
    url, token = given.get("publisher"), given.get("token")
    if not isinstance(url, str) or not url.startswith("http://"):
        raise BadRequest.at("source.publisher", "expected the http:// address of a WeightPublisher, for kind 'shm'")
    if token is not None and not isinstance(token, str):
        raise BadRequest.at("source.token", f"expected a string, not {type(token).__name__}")
    return Endpoint(url, None, token)


def refuse_undrained(drained: Iterable[Lane]) -> None:
    """Raise Conflict for the lanes that weights would find running."""
    undrained = [lane for lane in LANES if lane not in drained]
    if undrained:
        raise Conflict(f"lane {', '.join(undrained)} is not drained", type="not_drained", detail={"lanes": undrained})
