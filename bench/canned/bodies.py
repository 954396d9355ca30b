"""Answers as bytes, in pieces around the request id and the prompt length; built once per length and finish reason.

Invariant: every answer has as many ids as it says, each with its logprob, in full width: float32 values, printed as
doubles, as engines send them.
"""

from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bodies"]

SEED = 17
"""Seed of the canned ids and logprobs."""
ID = "@ID@"
"""Where an answer has the request's id."""
PROMPT = "@PROMPT@"
"""Where it has the length of the prompt."""
TOTAL = "@TOTAL@"
"""Where it has the length of prompt and answer."""


class Bodies:
    """The answers of one dialect.

    Args:
        build: makes an answer as values, from ids, logprobs, finish reason (stop, length or abort) and weight label;
            `ID` may stand within a string once, `PROMPT` and `TOTAL` as values, once each, in this order or none.
        response_tokens: ids of the longest answer.
        vocab: ids are below this.
        weight_version: the label at first.
    """

    def __init__(
        self,
        build: Callable[[list[int], list[float], str, str], dict[str, Any]],
        *,
        response_tokens: int,
        vocab: int,
        weight_version: str,
    ) -> None:
        rng = random.Random(SEED)
        self._ids = [rng.randrange(vocab) for _ in range(response_tokens)]
        self._logprobs = [struct.unpack("f", struct.pack("f", -rng.expovariate(1.0)))[0] for _ in self._ids]
        self._build = build
        self._cache: dict[tuple[int, str], tuple[bytes, bytes, bytes, bytes]] = {}
        self.response_tokens = response_tokens
        self.weight_version = weight_version

    def set_version(self, weight_version: str) -> None:
        """Report this weight label from now on."""
        self.weight_version = weight_version
        self._cache.clear()

    def body(self, tokens: int, finish: str, wire_id: bytes, prompt_tokens: int) -> bytes:
        """An answer with that many ids; `finish`: stop, length or abort."""
        pieces = self._cache.get((tokens, finish))
        if pieces is None:
            pieces = self._cache[tokens, finish] = self._pieces(tokens, finish)
        head, after_id, after_prompt, tail = pieces
        if not after_id:  # this dialect's answers name no request
            wire_id = b""
        total = b"%d" % (prompt_tokens + tokens) if after_prompt else b""
        return b"".join((head, wire_id, after_id, b"%d" % prompt_tokens, after_prompt, total, tail))

    def _pieces(self, tokens: int, finish: str) -> tuple[bytes, bytes, bytes, bytes]:
        raw = orjson.dumps(self._build(self._ids[:tokens], self._logprobs[:tokens], finish, self.weight_version))
        head, prompt, tail = raw.partition(b'"%b"' % PROMPT.encode())
        if not prompt:
            raise ValueError("an answer says how long its prompt was")
        head, _, after_id = head.partition(ID.encode())
        after_prompt, total, rest = tail.partition(b'"%b"' % TOTAL.encode())
        return (head, after_id, after_prompt, rest) if total else (head, after_id, b"", tail)
