"""Which dialects there are, and which may be meant.

Invariant: a dialect is an instance of its own for every worker; `auto` is every dialect, in the order they are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from rollout_svc.engines.dialect import Dialect
from rollout_svc.engines.lmdeploy import LMDeployDialect
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.vllm import VLLMDialect

__all__ = ["AUTO", "DIALECTS", "candidates"]

AUTO: Final = "auto"

DIALECTS: Final[dict[str, Callable[[], Dialect]]] = {
    "sglang": SGLangDialect,
    "vllm": VLLMDialect,
    "lmdeploy": LMDeployDialect,
}
"""By name, in the order `auto` tries them."""


def candidates(name: str) -> tuple[Dialect, ...]:
    """Make the dialects an engine configured so may speak; never empty.

    Raises:
        KeyError: there is no such dialect.
    """
    names = DIALECTS if name == AUTO else (name,)
    return tuple(DIALECTS[each]() for each in names)
