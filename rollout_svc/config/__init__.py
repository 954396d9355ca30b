"""The settings of a service, as frozen values; defaults and bounds live here."""

from rollout_svc.config.base import Listed
from rollout_svc.config.settings import (
    AgentConfig,
    BufferConfig,
    Config,
    JudgerConfig,
    PauseConfig,
    PluginConfig,
    ProducerConfig,
    PromptsConfig,
    Routing,
    SamplingConfig,
    ServiceConfig,
    TaskConfig,
    TokenizerConfig,
    TrainerConfig,
    is_loopback,
)
from rollout_svc.config.workers import LaunchConfig, WorkerConfig

__all__ = [
    "AgentConfig",
    "BufferConfig",
    "Config",
    "JudgerConfig",
    "LaunchConfig",
    "Listed",
    "PauseConfig",
    "PluginConfig",
    "ProducerConfig",
    "PromptsConfig",
    "Routing",
    "SamplingConfig",
    "ServiceConfig",
    "TaskConfig",
    "TokenizerConfig",
    "TrainerConfig",
    "WorkerConfig",
    "is_loopback",
]
