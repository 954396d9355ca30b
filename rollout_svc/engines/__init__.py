"""Engine dialects: pure build-request / parse-response, and the one HTTP transport that carries them."""

from rollout_svc.engines.calls import (
    Call,
    Completion,
    EngineInfo,
    EngineProfile,
    GenerateRequest,
    Health,
    Lift,
    Reply,
    WrittenIds,
)
from rollout_svc.engines.dialect import Dialect, StreamReader, Transport
from rollout_svc.engines.endpoint import Endpoint
from rollout_svc.engines.http import HttpTransport
from rollout_svc.engines.lmdeploy import LMDeployDialect
from rollout_svc.engines.registry import DIALECTS, candidates
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.vllm import VLLMDialect

__all__ = [
    "DIALECTS",
    "Call",
    "Completion",
    "Dialect",
    "Endpoint",
    "EngineInfo",
    "EngineProfile",
    "GenerateRequest",
    "Health",
    "HttpTransport",
    "LMDeployDialect",
    "Lift",
    "Reply",
    "SGLangDialect",
    "StreamReader",
    "Transport",
    "VLLMDialect",
    "WrittenIds",
    "candidates",
]
