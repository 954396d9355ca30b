"""What a trainer holds of a service on Ray: the same method names, each with `.remote()`.

Invariants:

- A batch that arrived in this process is acknowledged with this handle's next take, unless it is told not to.
- The actor has one name in one namespace; who connects finds it there, or is told who is.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping, load_config
from rollout_svc.errors import ConfigError, NotFound
from rollout_svc.ray.actor import GROUPS, ServiceActor
from rollout_svc.ray.batch import last_taken

__all__ = ["RolloutHandle", "connect", "start", "stop"]

_BATCHES: Final = ("take_batch", "evaluate")
_CALLS: Final = (
    *(
        "ready",
        "status",
        "memory",
        "pause",
        "resume",
        "ack",
        "put_prompts",
        "update_weights",
        "set_concurrency",
        "workers",
    ),
    *("memory", "add_worker", "remove_worker", "stop"),
    *_BATCHES,
)


class _Call:
    """One method; `remote` returns Ray's reference to what it returns."""

    __slots__ = ("_method",)

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._method.remote(*args, **kwargs)


class _Take(_Call):
    """`take_batch`, which brings the acknowledgement of the batch before."""

    __slots__ = ("_client",)

    def __init__(self, method: Any, client: str) -> None:
        super().__init__(method)
        self._client = client

    def remote(self, step: int, groups: int, timeout_s: float, ack: list[str] | None = None) -> Any:
        """Take a batch; `ack`: batches to acknowledge with it, None: the one this handle got last."""
        last = last_taken(self._client) if ack is None else None
        acked = ([] if last is None else [last]) if ack is None else list(ack)
        return self._method.remote(step, groups, timeout_s, acked, client=self._client)


class RolloutHandle:
    """A service on Ray: `handle.pause.remote(...)` and so on; see `RolloutService` for what each call takes."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self._client = uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"<RolloutHandle {self.actor!r}>"

    def __getattr__(self, name: str) -> Any:
        if name not in _CALLS:
            raise AttributeError(f"the service has no call {name!r}: {', '.join(_CALLS)}")
        method = getattr(self.actor, name)
        return _Take(method, self._client) if name == "take_batch" else _Call(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return RolloutHandle, (self.actor,)


def start(config: str | Path | Mapping[str, Any] | Config, name: str = "rollout", **options: Any) -> RolloutHandle:
    """Start the service as a named actor, and wait until its engines are there.

    Args:
        config: a file, its content, or the settings.
        name: of the actor, in the namespace of `cluster`.
        options: of the actor, as Ray's `options` takes them.

    Raises:
        ConfigError: it cannot be used, or is for no cluster.
    """
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    settings = _read(config)
    if settings.cluster is None:
        raise ConfigError.at("cluster", "is required to run on Ray: `cluster: ray`")
    actor = _remote(ray).options(name=name, namespace=settings.cluster.namespace, max_restarts=-1, **options)
    handle = RolloutHandle(actor.remote(settings))
    ray.get(handle.ready.remote())
    return handle


def connect(name: str = "rollout", namespace: str = "rollout_svc") -> RolloutHandle:
    """Find a service by its name, from any job of the cluster; raises NotFound where there is none."""
    import ray  # noqa: PLC0415 - as above

    try:
        return RolloutHandle(ray.get_actor(name, namespace))
    except ValueError as error:
        raise NotFound(f"no service {name!r} in the namespace {namespace!r}") from error


def stop(handle: RolloutHandle) -> None:
    """Drain a service under its pause deadline, and end its actor."""
    import ray  # noqa: PLC0415 - as above

    ray.get(handle.stop.remote())
    ray.kill(handle.actor)


def _read(config: str | Path | Mapping[str, Any] | Config) -> Config:
    if isinstance(config, Config):
        return config
    return config_from_mapping(config) if isinstance(config, Mapping) else load_config(config)


def _remote(ray: Any) -> Any:
    """The actor's class as Ray's, each of its calls in its concurrency group."""
    for name in _CALLS:
        group = "batches" if name in _BATCHES else "control"
        ray.method(concurrency_group=group)(getattr(ServiceActor, name))
    return ray.remote(concurrency_groups=dict(GROUPS))(ServiceActor)
