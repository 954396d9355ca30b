"""The rollout stage of an asynchronous LLM-RL loop, as a service.

The names below are imported when they are first used, so that `import rollout_svc` costs nothing and a trainer that
only wants a client does not load the service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rollout_svc.configfile import config_from_mapping, load_config
    from rollout_svc.judging import JudgedSample, JudgeFailed, Reward
    from rollout_svc.rpc.blocking import SyncRolloutClient
    from rollout_svc.rpc.client import RolloutClient
    from rollout_svc.rpc.publisher import SyncWeightPublisher
    from rollout_svc.service import RolloutService
    from rollout_svc.weights.probe import Probe
    from rollout_svc.weights.publisher import WeightPublisher

__all__ = [
    "JudgeFailed",
    "JudgedSample",
    "Probe",
    "Reward",
    "RolloutClient",
    "RolloutService",
    "SyncRolloutClient",
    "SyncWeightPublisher",
    "WeightPublisher",
    "config_from_mapping",
    "load_config",
]

_HOMES: Final = {
    "JudgeFailed": "rollout_svc.judging",
    "JudgedSample": "rollout_svc.judging",
    "Probe": "rollout_svc.weights.probe",
    "Reward": "rollout_svc.judging",
    "RolloutClient": "rollout_svc.rpc.client",
    "RolloutService": "rollout_svc.service",
    "SyncRolloutClient": "rollout_svc.rpc.blocking",
    "SyncWeightPublisher": "rollout_svc.rpc.publisher",
    "WeightPublisher": "rollout_svc.weights.publisher",
    "config_from_mapping": "rollout_svc.configfile",
    "load_config": "rollout_svc.configfile",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
