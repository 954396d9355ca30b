"""What a caller asks for when it asks for new weights, checked before anything is stopped.

Invariant: pure; a request that passed can be carried out or fails for a reason that lies with the fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from rollout_svc.engines import Endpoint
from rollout_svc.engines.updates.protocol import WAYS
from rollout_svc.errors import BadRequest, Conflict
from rollout_svc.gate import LANES, Lane
from rollout_svc.weights.fleet import Source
from rollout_svc.weights.probe import Probe
from rollout_svc.weights.staging import Publisher

__all__ = ["read_source", "read_version", "refuse_old", "refuse_undrained"]

_ECHO_CHARS: Final = 100  # of a caller's own words, in an error message


def read_version(version: object) -> int:
    """Read which weights they are; raises BadRequest."""
    if type(version) is not int or version < 0:
        raise BadRequest.at("version", f"expected a whole number from 0, not {version!r}")
    return version


def refuse_old(version: int, current: int, *, force: bool) -> None:
    """Raise Conflict for weights that are not newer than the fleet's, unless they are wanted all the same.

    A trainer that was restarted from an earlier step, or that brings odd workers the weights of the others, says so.
    """
    if version <= current and not force:
        raise Conflict(
            f"version {version} is not greater than {current}, the fleet's; `force: true` brings it all the same",
            type="old_version",
            detail={"version": version, "weight_version": current},
        )


def read_source(given: Mapping[str, Any]) -> Source:
    """Read where weights come from; raises BadRequest at the field that is wrong."""
    source = _read_kind(given)
    probe = given.get("probe")
    return source if probe is None else replace(source, probe=Probe.read(probe))


def _read_kind(given: Mapping[str, Any]) -> Source:
    kind, path, workers = given.get("kind"), given.get("path"), given.get("workers")
    if kind == "disk":
        if not isinstance(path, str) or not path:
            raise BadRequest.at("source.path", "needed for kind 'disk'")
        if "\0" in path:
            raise BadRequest.at("source.path", "there is no path with a zero byte")
        finite, names = _flag(given, "check_finite"), _flag(given, "check_names", default=True)
        return Source(kind, path, check_finite=finite, check_names=names)
    if given.get("check_finite"):
        raise BadRequest.at("source.check_finite", "for kind 'disk'; a publisher asks for it with its weights")
    if not given.get("check_names", True):
        raise BadRequest.at("source.check_names", "for kind 'disk'; a publisher has it as an argument of `publish`")
    way = next((known for known in WAYS if known == kind), None)
    if way is not None:
        return Source(way, publisher=Publisher(_endpoint(given, way), way))
    if kind != "external":
        told = f"expected one of {', '.join(('disk', 'external', *WAYS))}, not {str(kind)[:_ECHO_CHARS]!r}"
        raise BadRequest.at("source.kind", told)
    if workers is None:
        return Source(kind)
    if not isinstance(workers, list | tuple) or not all(isinstance(name, str) for name in workers):
        raise BadRequest.at("source.workers", "expected a list of worker ids")
    return Source(kind, workers=frozenset(workers))


def _flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    flag = given.get(name, default)
    if not isinstance(flag, bool):
        raise BadRequest.at(f"source.{name}", f"expected true or false, not {type(flag).__name__}")
    return flag


def _endpoint(given: Mapping[str, Any], way: str) -> Endpoint:
    url, token = given.get("publisher"), given.get("token")
    if not isinstance(url, str) or not url.startswith("http://") or not _has_host(url):
        raise BadRequest.at("source.publisher", f"expected the http:// address of a WeightPublisher, for kind {way!r}")
    if token is not None and not isinstance(token, str):
        raise BadRequest.at("source.token", f"expected a string, not {type(token).__name__}")
    return Endpoint(url, None, token)


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port, or an address, that there cannot be
        return False


def refuse_undrained(drained: Iterable[Lane]) -> None:
    """Raise Conflict for the lanes that weights would find running."""
    undrained = [lane for lane in LANES if lane not in drained]
    if undrained:
        raise Conflict(f"lane {', '.join(undrained)} is not drained", type="not_drained", detail={"lanes": undrained})
