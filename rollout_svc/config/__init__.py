"""The settings of a service, as frozen values; defaults and bounds live here."""

from rollout_svc.config.base import Listed
from rollout_svc.config.settings import (
    BufferConfig,
    Config,
    EvaluationConfig,
    JournalConfig,
    PauseConfig,
    PauseMode,
    ProducerConfig,
    Routing,
    ServiceConfig,
    Strategy,
    TokenizerConfig,
    TrainerConfig,
    TrajectoriesConfig,
    is_loopback,
)
from rollout_svc.config.tasks import (
    AgentConfig,
    FilterConfig,
    JudgerConfig,
    PluginConfig,
    PromptsConfig,
    SamplingConfig,
    TaskConfig,
)
from rollout_svc.config.workers import Dialect, LaunchConfig, WorkerConfig, address_of

__all__ = [
    "AgentConfig",
    "BufferConfig",
    "Config",
    "Dialect",
    "EvaluationConfig",
    "FilterConfig",
    "JournalConfig",
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
    "Strategy",
    "TaskConfig",
    "TokenizerConfig",
    "TrainerConfig",
    "TrajectoriesConfig",
    "WorkerConfig",
    "address_of",
    "is_loopback",
]
