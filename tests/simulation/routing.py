"""Routed experts as simulated engines send them: each row says which token it is of, and which request brought it.

Invariant: a history of rows can be held against the tokens and the calls it has to come from, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rollout_svc.config import ExpertsConfig

if TYPE_CHECKING:
    from tests.simulation.engine import Request

__all__ = ["ROUTED", "lifted_of", "may_lack", "problem"]

_EXPERTS: Final = 256
ROUTED: Final = ExpertsConfig(enabled=True, num_experts=_EXPERTS, top_k=1, layers=2)
"""Two layers of 256 experts: the first is of the token, the second of the request."""


def lifted_of(request: Request) -> bytes | None:
    """What the engine sends for a request: raw int32, from the row that was asked for; or what it lies."""
    if request.experts_from is None or request.unrouted or request.lie == "experts_missing":
        return None
    tokens = [*request.input_ids, *request.tokens][request.experts_from : -1]
    rows = np.array([(token % _EXPERTS, request.serial % _EXPERTS) for token in tokens], dtype="<i4").reshape(-1, 2, 1)
    if request.lie == "experts_rows":
        rows = rows[:-1]
    elif request.lie == "experts_range" and rows.size:
        rows[len(rows) // 2, 0, 0] = _EXPERTS
    return rows.tobytes()


def may_lack(request: Request) -> bool:
    """Whether its tokens count without rows: it was cut, and is gone on with."""
    return request.finish == "abort" and len(request.tokens) < request.max_tokens


def problem(held: Any, tokens: list[int], brought_by: list[int]) -> str | None:
    """What is wrong with a history of rows; None when nothing is.

    Args:
        held: the array, or None for no rows.
        tokens: prompt and response.
        brought_by: for each row there should be, the number of the request whose answer it came with.
    """
    rows = np.zeros((0, 2, 1), dtype=np.uint8) if held is None else held.read()
    if rows.shape != (len(brought_by), 2, 1) or rows.dtype != np.uint8:
        return f"{rows.dtype} {rows.shape}, where {len(brought_by)} rows came"
    if len(brought_by) > len(tokens):
        return f"{len(brought_by)} rows came for {len(tokens)} tokens"
    made = [[token % _EXPERTS, serial % _EXPERTS] for token, serial in zip(tokens, brought_by, strict=False)]
    found = rows[:, :, 0].tolist()
    if found != made:
        first = next(place for place, (one, other) in enumerate(zip(found, made, strict=True)) if one != other)
        return f"row {first} is {found[first]}, it should be {made[first]}"
    return None
