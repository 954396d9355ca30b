"""The cluster that a configuration names, and the one that the driver is in.

Invariants:

- A driver that is in no cluster joins the one of the configuration; nothing is ever started for it.
- One that is in another is told, before anything is made: Ray has one cluster in a process.
- The service's actor and those of its engines have their names in one namespace.
"""

from __future__ import annotations

from typing import Any

from rollout_svc.config import ClusterConfig, Config
from rollout_svc.errors import ConfigError
from rollout_svc.tensors.ray_connection import is_cluster, join

__all__ = ["join_cluster", "named_in"]


def join_cluster(cluster: ClusterConfig) -> None:
    """Be in the cluster that is configured.

    Raises:
        ConfigError: it is not there, or this process is in another.
    """
    import ray  # noqa: PLC0415 - 1.2 s, for those who have Ray

    here: Any = ray
    if not here.is_initialized():
        try:
            join(cluster.address)
        except ConnectionError as error:
            raise ConfigError.at("cluster.address", str(error)) from error
        return
    context = here.get_runtime_context()
    told = f"{cluster.address!r} is not the cluster that this process is connected to, {context.gcs_address}"
    try:
        same = is_cluster(cluster.address)
    except Exception as error:
        raise ConfigError.at("cluster.address", f"{told}: {error}") from error
    if not same:
        raise ConfigError.at("cluster.address", f"{told}; leave it out, or connect to that one first")


def named_in(config: Config, cluster: ClusterConfig, namespace: str | None) -> tuple[Config, str]:
    """Say in which namespace a service has its name, and give the settings that have its engines' there too.

    Args:
        config: the settings.
        cluster: of the settings.
        namespace: that the caller wants; None: the configured one.

    Raises:
        ConfigError: the settings name another.
    """
    if namespace in (None, cluster.namespace):
        return config, cluster.namespace
    if "namespace" in cluster.model_fields_set:
        told = f"{cluster.namespace!r} is not the namespace that the start was given, {namespace!r}"
        raise ConfigError.at("cluster.namespace", told)
    own = cluster.model_copy(update={"namespace": namespace})
    return config.model_copy(update={"cluster": own}), namespace
