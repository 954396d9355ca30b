"""Engine dialects: pure build-request / parse-response, and the one HTTP transport that carries them."""

from rollout_svc.engines.calls import Call, Completion, Dialect, EngineInfo, GenerateRequest, Reply
from rollout_svc.engines.http import Endpoint, Transport
from rollout_svc.engines.sglang import SGLangDialect

__all__ = [
    "Call",
    "Completion",
    "Dialect",
    "Endpoint",
    "EngineInfo",
    "GenerateRequest",
    "Reply",
    "SGLangDialect",
    "Transport",
]
