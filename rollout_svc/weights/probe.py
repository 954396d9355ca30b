"""A known answer: what certain weights generate, greedily, and how sure they are of it.

An engine that reports no weight version is asked to generate it; whoever has other weights gives other tokens, or the
same ones with other logprobs.

Invariants:

- One that was read or made is usable: as many logprobs as tokens, all finite, neither empty nor too long.
- It is the caller's, who has the weights; nothing here guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

from rollout_svc.errors import BadRequest

__all__ = ["DEFAULT_TOLERANCE", "MAX_PROMPT", "MAX_RESPONSE", "Probe"]

DEFAULT_TOLERANCE: Final = 1e-2
"""Between two logprobs of the same token: kernels and batches round differently, other weights are further off."""
MAX_PROMPT: Final = 1024
"""Tokens: the probe is made while everybody waits."""
MAX_RESPONSE: Final = 64
"""Tokens, for the same reason; after a few the greedy paths of two models differ."""
_MOST_ID: Final = 2**31 - 1
_KEYS: Final = ("prompt_ids", "response_ids", "logprobs", "tolerance", "every")


@dataclass(frozen=True, slots=True)
class Probe:
    """A prompt and what follows it under certain weights.

    Attributes:
        prompt_ids: token ids.
        response_ids: the greedy answer, its stop token included where it ends with one.
        logprobs: natural-log probability of each token of the answer, at temperature 1.
        tolerance: by how much one may differ.
        every: ask engines too that report the weight version themselves.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float = DEFAULT_TOLERANCE
    every: bool = False

    @classmethod
    def read(cls, given: object, where: str = "source.probe") -> Self:
        """Read one from a request; raises BadRequest at the field that is wrong."""
        if not isinstance(given, Mapping):
            raise BadRequest.at(where, f"expected an object, not {type(given).__name__}")
        unknown = sorted(set(map(str, given)) - set(_KEYS))
        if unknown:
            raise BadRequest.at(f"{where}.{unknown[0]}", f"unknown key; expected {', '.join(_KEYS)}")
        prompt = _ids(given.get("prompt_ids"), f"{where}.prompt_ids", MAX_PROMPT)
        response = _ids(given.get("response_ids"), f"{where}.response_ids", MAX_RESPONSE)
        logprobs = _logprobs(given.get("logprobs"), f"{where}.logprobs", len(response))
        tolerance = given.get("tolerance", DEFAULT_TOLERANCE)
        if not _is_number(tolerance) or tolerance <= 0:
            raise BadRequest.at(f"{where}.tolerance", f"expected a finite number above 0, not {tolerance!r:.50}")
        every = given.get("every", False)
        if not isinstance(every, bool):
            raise BadRequest.at(f"{where}.every", f"expected true or false, not {every!r:.50}")
        return cls(prompt, response, logprobs, float(tolerance), every)

    @classmethod
    def of(
        cls,
        model: Callable[..., Any],
        prompt_ids: Sequence[int],
        *,
        tokens: int = 8,
        stop: Collection[int] = (),
        tolerance: float = DEFAULT_TOLERANCE,
        every: bool = False,
    ) -> Self:
        """Make one with the weights a torch model has now.

        Args:
            model: maps int64[1, T] to logits, float[1, T, vocabulary], or to what has them as `logits`.
            prompt_ids: token ids.
            tokens: most of the answer.
            stop: ids at which the engines stop; the answer ends with the first of them.
            tolerance: by how much a logprob may differ.
            every: ask engines too that report the weight version themselves.

        Raises:
            BadRequest: too many tokens, or logprobs that are not finite.
        """
        import torch  # noqa: PLC0415 - the trainer has it

        prompt, response, logprobs = list(prompt_ids), list[int](), list[float]()
        device = next(model.parameters()).device if isinstance(model, torch.nn.Module) else None
        with torch.inference_mode(), _evaluating(model):
            while len(response) < tokens and not (response and response[-1] in stop):
                answer = model(torch.tensor([prompt + response], device=device))
                logits = getattr(answer, "logits", answer)[0, -1].float()
                found = torch.log_softmax(logits, dim=-1)
                chosen = int(found.argmax())
                response.append(chosen)
                logprobs.append(float(found[chosen]))
        given = {"prompt_ids": prompt, "response_ids": response, "logprobs": logprobs}
        return cls.read(given | {"tolerance": tolerance, "every": every}, "probe")

    def as_json(self) -> dict[str, Any]:
        """As a request has it."""
        return {
            "prompt_ids": list(self.prompt_ids),
            "response_ids": list(self.response_ids),
            "logprobs": list(self.logprobs),
            "tolerance": self.tolerance,
            "every": self.every,
        }

    def contradicted(self, ids: Sequence[int], logprobs: Sequence[float]) -> str | None:
        """Say how an answer differs from the known one, with both values; None where it does not."""
        if tuple(ids) != self.response_ids:
            return f"it generates {list(ids)}, the known answer is {list(self.response_ids)}"
        for place, (found, known) in enumerate(zip(logprobs, self.logprobs, strict=True)):
            if not abs(found - known) <= self.tolerance:
                far = f"{abs(found - known):.3g}, more than {self.tolerance:g} apart"
                return f"token {place} has logprob {found:.6g}, the known one is {known:.6g}: {far}"
        return None


def _evaluating(model: Any) -> Any:
    """A context in which dropout and the like are off, where the model knows of them."""
    if not getattr(model, "training", False):
        return nullcontext()
    return _Evaluating(model)


class _Evaluating:
    __slots__ = ("_model",)

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.eval()

    def __exit__(self, *_: object) -> None:
        self._model.train()


def _ids(given: object, where: str, most: int) -> tuple[int, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise BadRequest.at(where, "expected a list of token ids, one or more")
    if len(given) > most:
        raise BadRequest.at(where, f"at most {most} tokens, not {len(given)}")
    for place, one in enumerate(given):
        if type(one) is not int or not 0 <= one <= _MOST_ID:
            raise BadRequest.at(f"{where}.{place}", f"expected a token id, not {one!r:.50}")
    return tuple(given)


def _logprobs(given: object, where: str, count: int) -> tuple[float, ...]:
    if not isinstance(given, list | tuple):
        raise BadRequest.at(where, "expected a list of numbers")
    if len(given) != count:
        raise BadRequest.at(where, f"expected one for each of the {count} response_ids, not {len(given)}")
    for place, one in enumerate(given):
        if not _is_number(one):
            raise BadRequest.at(f"{where}.{place}", f"expected a finite number, not {one!r:.50}")
    return tuple(float(one) for one in given)


def _is_number(given: object) -> bool:
    if not isinstance(given, int | float) or isinstance(given, bool):
        return False
    try:
        return math.isfinite(given)
    except OverflowError:  # a whole number that no float holds
        return False
