"""Answers of 64 MiB, nearly all of it routed experts, as engines spell them."""

from __future__ import annotations

import random
from base64 import b64encode
from typing import Any

import numpy as np
import orjson

from bench.canned import sglang
from bench.canned.bodies import Bodies

__all__ = ["BODY_BYTES", "ENCODINGS", "KEY", "LAYERS", "TOP_K", "body", "head_and_tail"]

BODY_BYTES = 64 * 2**20
KEY = "routed_experts"
LAYERS, TOP_K, EXPERTS = 48, 8, 128
"""Of a mixture-of-experts model of 30 billion parameters."""
ENCODINGS = ("base64", "nested")
_SEED = 5
_TOKENS = 256
_MARK = "@EXPERTS@"


def head_and_tail() -> tuple[bytes, bytes]:
    """An answer of SGLang's with 256 tokens, cut where its routed experts are to stand."""

    def build(ids: list[int], logprobs: list[float], finish: str, label: str) -> dict[str, Any]:
        answer = sglang.answer(ids, logprobs, finish, label)
        return {**answer, "meta_info": {**answer["meta_info"], KEY: _MARK}}

    bodies = Bodies(build, response_tokens=_TOKENS, vocab=32_000, weight_version="0")
    whole = bodies.body(_TOKENS, "length", b"0" * 32, 128)
    head, _, tail = whole.partition(b'"%b"' % _MARK.encode())
    return head, tail


def body(encoding: str, size: int = BODY_BYTES) -> bytes:
    """An answer of that many bytes, or a few fewer.

    Args:
        encoding: `base64`, of int32; or `nested` lists.
        size: bytes.
    """
    head, tail = head_and_tail()
    room = size - len(head) - len(tail)
    rng = np.random.default_rng(_SEED)
    if encoding == "base64":
        rows = (room - 2) // 4 * 3 // (4 * LAYERS * TOP_K)
        value = b'"%b"' % b64encode(rng.integers(0, EXPERTS, (rows, LAYERS, TOP_K), dtype="<i4").tobytes())
    else:
        some = [orjson.dumps(row.tolist()) for row in rng.integers(0, EXPERTS, (512, LAYERS, TOP_K), dtype="<i4")]
        draw = random.Random(_SEED)
        chosen: list[bytes] = []
        while room > 0:
            chosen.append(draw.choice(some))
            room -= len(chosen[-1]) + 1
        value = b"[%b]" % b",".join(chosen[:-1])
    return head + value + tail
