"""Sampling settings in the words that all engines share.

Invariants:

- A setting that is null or empty is not sent; zero and false are.
- What asks for routed experts is the request's own field, never a setting: of what users pass on to the engine, the
  keys that would are left out, or an evaluation could ask.
- Made once for each settings object, for they are the same for thousands of requests: whoever is given the result
  copies it before adding to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from rollout_svc.config import SamplingConfig
from rollout_svc.engines.calls import GenerateRequest, Lift

__all__ = ["EXPERT_KEYS", "LIFTED", "UNSENT", "SamplingParams", "extra_of", "lift_of"]

EXPERT_KEYS: Final = frozenset({"return_routed_experts", "routed_experts_prompt_start", "routed_experts_start_len"})
"""By which the engines are asked for routed experts, each by its own."""
LIFTED: Final = "routed_experts"
"""The key all of them answer with."""

UNSENT: Final[tuple[Any, ...]] = (None, [], {}, "")
"""What stands for a setting that is not given."""
_KEPT: Final = 256  # distinct settings whose parameters are kept


class SamplingParams:
    """Makes and keeps the parameters of settings.

    Args:
        neutral: what an engine has to be told although it was not asked for, where its own defaults change the draw.
    """

    __slots__ = ("_known", "_neutral")

    def __init__(self, neutral: Mapping[str, Any] | None = None) -> None:
        self._neutral = dict(neutral or {})
        self._known: dict[int, tuple[SamplingConfig, dict[str, Any]]] = {}

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._known)

    def of(self, sampling: SamplingConfig) -> dict[str, Any]:
        """The parameters of these settings, without the budget and the seed, which belong to the request."""
        known = self._known.get(id(sampling))
        if known is not None:
            return known[1]
        params: dict[str, Any] = {**self._neutral, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k is not None:
            params["top_k"] = sampling.top_k
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        given = {key: value for key, value in sampling.extra.items() if value not in UNSENT}
        params.update({key: value for key, value in given.items() if key not in EXPERT_KEYS})
        if len(self._known) >= _KEPT:
            self._known.clear()
        self._known[id(sampling)] = (sampling, params)  # held, so that nobody else gets its id
        return params


def extra_of(request: GenerateRequest) -> Mapping[str, Any]:
    """The keys from the prompt line that are passed on."""
    extra = request.extra
    if EXPERT_KEYS.isdisjoint(extra):
        return extra
    return {key: value for key, value in extra.items() if key not in EXPERT_KEYS}


def lift_of(request: GenerateRequest, encoding: Literal["base64", "numbers"], *, unasked: bool = False) -> Lift | None:
    """What is to be taken out of the answer; None where no routed experts will be in it.

    Args:
        request: whether it asks, and for how much at most.
        encoding: of the engine.
        unasked: the engine sends them to everybody.
    """
    if request.experts_from is None and not unasked:
        return None
    return Lift(LIFTED, encoding, request.experts_max_bytes)
