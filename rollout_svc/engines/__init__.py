"""Engine dialects: pure build-request / parse-response, and the one HTTP transport that carries them."""

from rollout_svc.engines.calls import Call, Completion, Dialect, EngineInfo, GenerateRequest, Reply, Transport
from rollout_svc.engines.endpoint import Endpoint
from rollout_svc.engines.http import HttpTransport
from rollout_svc.engines.sglang import SGLangDialect

__all__ = [
    "Call",
    "Completion",
    "Dialect",
    "Endpoint",
    "EngineInfo",
    "GenerateRequest",
    "HttpTransport",
    "Reply",
    "SGLangDialect",
    "Transport",
]
