"""The settings of a service, as frozen values; defaults and bounds live here."""

from rollout_svc.config.base import Listed
from rollout_svc.config.settings import (
    AgentConfig,
    BufferConfig,
    Config,
    JudgerConfig,
    PauseConfig,
    PauseMode,
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
from rollout_svc.config.workers import Dialect, LaunchConfig, WorkerConfig, address_of

__all__ = [
    "AgentConfig",
    "BufferConfig",
    "Config",
    "Dialect",
    "JudgerConfig",
    "LaunchConfig",
    "Listed",
    "PauseConfig",
    "PauseMode",
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
    "address_of",
    "is_loopback",
]
