"""The life of a service on Ray: `start`, `connect`, `stop`.

Invariants:

- Every wait has a bound. A start that failed leaves no actor, and raises what it failed with.
- An actor has one name in one namespace; who connects finds it there, or is told that there is none.
- Ray starts an actor again only where it goes on: with a journal. Without one it would begin anew under the same name,
  and nobody would be told; then its end is an end, and every call says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping, load_config
from rollout_svc.errors import ConfigError, Conflict, NotFound, RolloutError
from rollout_svc.ray.actor import BATCHES, GROUPS, WAITING, ServiceActor
from rollout_svc.ray.handle import CALLS, RolloutHandle
from rollout_svc.ray.joining import join_cluster, named_in
from rollout_svc.startup import StartFailed, StartTimeout
from rollout_svc.tensors.ray_connection import first_line

__all__ = ["connect", "start", "stop"]

NAME: Final = "rollout"
NAMESPACE: Final = "rollout_svc"
_INIT_S: Final = 180.0  # seconds to be placed, to bind, and to read the journal
_CONNECT_S: Final = 60.0  # seconds for an actor that is started again to be there
_ASK_S: Final = 10.0  # seconds for an actor that runs to answer something small
_POLL_S: Final = 0.1  # seconds between two looks at an actor that is started again, or ends
_GONE_S: Final = 10.0  # seconds for Ray to have noticed an end


def start(
    config: str | Path | Mapping[str, Any] | Config,
    name: str = NAME,
    *,
    namespace: str | None = None,
    detached: bool = False,
    wait: bool = True,
    timeout_s: float | None = None,
    **options: Any,
) -> RolloutHandle:
    """Start the service as a named actor; a process that is in no cluster joins the one that is configured.

    Args:
        config: a file, its content, or the settings.
        name: of the actor.
        namespace: in which it and its engines have their names; None: `cluster.namespace`, and nothing else where
            that is given.
        detached: whether it outlives the job that started it; then it ends with `stop` alone.
        wait: until its engines are there; False: until its control API is, and `ready` says the rest.
        timeout_s: how long to wait for all of it; None: `start_timeout_s`, and as long as an actor takes to start.
        options: of the actor, as Ray's `options` takes them (`num_cpus`, `resources`, `scheduling_strategy`, …).

    Raises:
        ConfigError: it cannot be used, or is for no cluster, or for another than this process is in; nothing is left.
        Conflict: `name_taken`: there is an actor of that name.
        StartFailed: engines did not come up, the actor ended, or the cluster has no place for it; nothing is left.
    """
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    settings = _read(config)
    if settings.cluster is None:
        raise ConfigError.at("cluster", "is required to run on Ray: `cluster: ray`")
    join_cluster(settings.cluster)
    settings, namespace = named_in(settings, settings.cluster, namespace)
    restarts = 0 if settings.buffer.path is None else -1
    named = {"name": name, "namespace": namespace, "max_restarts": restarts} | options
    if detached:
        named["lifetime"] = "detached"
    deadline = time.monotonic() + (settings.start_timeout_s + _INIT_S if timeout_s is None else timeout_s)
    try:
        actor = _remote(ray).options(**named).remote(settings)
    except ValueError as error:
        raced = isinstance(error, ray.exceptions.ActorAlreadyExistsError)  # another start made it meanwhile
        if not raced and "already taken" not in str(error):
            raise
        detail = {"name": name, "namespace": namespace}
        message = f"there is an actor {name!r} in the namespace {namespace!r}: connect to it, stop it, or take another"
        raise Conflict(message, type="name_taken", detail=detail) from error
    handle = RolloutHandle(actor)
    try:
        _get(ray, actor.made.remote(), deadline, f"actor {name!r}: the cluster has no place for it, or it hangs")
        if wait:
            _get(ray, actor.ready.remote(), deadline, f"actor {name!r}: its engines did not come up")
    except BaseException as error:
        _end(ray, handle)
        if not isinstance(error, ray.exceptions.RayError) or isinstance(error, ray.exceptions.RayTaskError):
            raise
        raise StartFailed(f"actor {name!r} ended before all was there: {first_line(error)}") from error
    return handle


def connect(name: str = NAME, namespace: str = NAMESPACE, *, timeout_s: float = _CONNECT_S) -> RolloutHandle:
    """Find a service by its name, from any job of the cluster; waits for one that is being started again.

    Raises:
        NotFound: there is none, or it ended.
        StartTimeout: it did not answer in time.
    """
    import ray  # noqa: PLC0415 - as above

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            actor: Any = ray.get_actor(name, namespace)
        except ValueError as error:
            raise NotFound(f"no service {name!r} in the namespace {namespace!r}") from error
        try:
            _get(ray, actor.made.remote(), deadline, f"service {name!r} did not answer")
        except ray.exceptions.ActorUnavailableError as error:
            if time.monotonic() >= deadline:
                raise StartTimeout(f"service {name!r} did not answer: it is being started again") from error
            time.sleep(_POLL_S)
        except ray.exceptions.ActorDiedError as error:
            raise NotFound(f"the service {name!r} in the namespace {namespace!r} has ended") from error
        except StartTimeout:
            raise
        except (RolloutError, ray.exceptions.RayTaskError):
            return RolloutHandle(actor)  # its service could not be made: every call says so, and it can be stopped
        else:
            return RolloutHandle(actor)


def stop(handle: RolloutHandle, *, timeout_s: float | None = None) -> None:
    """Drain a service under its pause deadline, and end its actor; idempotent. One that does not answer is ended.

    Args:
        handle: of the service; also of one that has ended.
        timeout_s: how long the drain may take; None: as long as the service's own settings allow.
    """
    import ray  # noqa: PLC0415 - as above

    actor = handle.actor
    try:
        within = ray.get(actor.stops_within.remote(), timeout=_ASK_S) if timeout_s is None else timeout_s
        ray.get(actor.stop.remote(), timeout=within)
    except ray.exceptions.RayError:  # it has ended, is started again, hangs, or failed: there is nothing to drain
        pass
    _end(ray, handle)


def _end(ray: Any, handle: RolloutHandle) -> None:
    """End an actor for good, and wait until Ray knows."""
    ray.kill(handle.actor, no_restart=True)
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        try:
            ray.get(handle.actor.stops_within.remote(), timeout=_POLL_S)
        except ray.exceptions.ActorDiedError:
            return
        except ray.exceptions.RayError:
            time.sleep(_POLL_S)


def _get(ray: Any, reference: Any, deadline: float, otherwise: str) -> Any:
    """Wait for an answer; raises what the service raised as it was, without what Ray puts around it."""
    try:
        return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        raise StartTimeout(otherwise) from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RolloutError):
            raise error.cause from None
        raise


def _read(config: str | Path | Mapping[str, Any] | Config) -> Config:
    if isinstance(config, Config):
        return config
    return config_from_mapping(config) if isinstance(config, Mapping) else load_config(config)


def _remote(ray: Any) -> Any:
    """The actor's class as Ray's, each of its calls in its concurrency group."""
    for name in (*CALLS, "made", "stops_within"):
        group = "batches" if name in BATCHES else "waiting" if name in WAITING else "control"
        ray.method(concurrency_group=group)(getattr(ServiceActor, name))
    return ray.remote(concurrency_groups=dict(GROUPS))(ServiceActor)
