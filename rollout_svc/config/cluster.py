"""Where a service and its engines run once one machine is not enough: a Ray cluster."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from rollout_svc.config.base import Settings

__all__ = ["Cluster", "ClusterConfig", "Resources"]

Amount = Annotated[float, Field(gt=0, le=1_000_000)]
Resources = dict[Annotated[str, Field(min_length=1)], Amount]
"""How much of each of Ray's resources: `CPU`, `GPU`, and whatever a cluster's nodes call their own."""


class ClusterConfig(Settings):
    """A Ray cluster: launched engines run in actors on a placement group, on whichever node has room for them."""

    kind: Literal["ray"] = "ray"
    """`ray`; `cluster: ray` alone means all of this by default."""
    address: str = Field("auto", min_length=1)
    """Of the cluster; `auto` finds the one that runs on this machine, or the one this process belongs to."""
    namespace: str = Field("rollout_svc", min_length=1)
    """In which the actors and groups of this service have their names."""
    runtime_env: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Ray's runtime environment of the engines' actors: `env_vars`, `working_dir`, `pip`."""
    strategy: Literal["pack", "spread", "strict_pack", "strict_spread"] = "pack"
    """How the engines of the configuration are laid out over nodes; a later one goes where there is room."""


def _spelled_out(value: Any) -> Any:
    """`cluster: ray` is the whole of it by default."""
    return {"kind": value} if isinstance(value, str) else value


Cluster = Annotated[ClusterConfig | None, BeforeValidator(_spelled_out)]
