"""SGLang's streamed answers: cumulative by default, deltas with `--incremental-streaming-output`.

Invariants:

- Pure. An event is decoded when its answer is asked for, not when it comes: a cumulative stream of n tokens carries
  O(n^2) of them, and only its last event counts.
- What is returned was checked as a whole answer is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Completion
from rollout_svc.engines.sse import DONE
from rollout_svc.errors import SampleFailure, WorkerFailure

__all__ = ["SGLangReader"]

_SERVER_ERRORS: Final = 500
_ABORTED: Final = {"type": "abort"}


class SGLangReader:
    """Collects the events of one answer."""

    __slots__ = ("_cumulative", "_ended", "_parse", "_payloads")

    def __init__(self, parse: Callable[[Any], Completion]) -> None:
        self._parse = parse
        self._payloads: list[bytes] = []
        self._cumulative: bool | None = None
        self._ended = False

    def feed(self, payload: bytes) -> None:
        """Keep the payload, and of a cumulative stream the last one only."""
        if payload == DONE:
            self._ended = True
            return
        if self._cumulative is None and len(self._payloads) == 1:
            self._cumulative = _is_whole(payload)
        if self._cumulative and not payload.startswith(b'{"error"'):
            self._payloads[-1] = payload
        else:
            self._payloads.append(payload)

    def completion(self) -> Completion:
        """Read the whole answer.

        Raises:
            SampleFailure: it is invalid, or the stream ended before it did.
            WorkerFailure: the engine said in the stream that it failed.
        """
        bodies = self._bodies()
        for body in bodies:
            if isinstance(body, dict) and "error" in body:
                raise _failure(body["error"])
        if not self._ended or not bodies:
            raise WorkerFailure("cut_off", "the stream ended before its answer did", accepted=True)
        try:
            whole = _joined(bodies)
        except (KeyError, TypeError, AttributeError) as error:
            raise SampleFailure("invalid_response", f"{type(error).__name__}: {error} in a streamed event") from error
        return self._parse(whole)

    def partial(self) -> Completion | None:
        """What has come, as an abort; None where that is nothing or not valid."""
        try:
            bodies = [body for body in self._bodies() if isinstance(body, dict) and "error" not in body]
            if not bodies:
                return None
            body = _joined(bodies)
            if not body["meta_info"].get("finish_reason"):
                body["meta_info"]["finish_reason"] = _ABORTED
            completion = self._parse(body)
        except (SampleFailure, KeyError, TypeError, AttributeError):
            return None
        return completion if completion.ids else None

    def _bodies(self) -> list[Any]:
        try:
            return [orjson.loads(payload) for payload in self._payloads]
        except ValueError as error:
            raise SampleFailure("invalid_response", f"an event that is no JSON: {error}") from error


def _is_whole(payload: bytes) -> bool:
    """Whether an event that is not the first carries everything so far: as many ids as were made."""
    try:
        body = orjson.loads(payload)
        made = body["meta_info"]["completion_tokens"]
        return bool(len(body["output_ids"]) >= made)
    except (ValueError, KeyError, TypeError):
        return False


def _joined(bodies: list[Any]) -> dict[str, Any]:
    """One body of all; the last event's words hold for the whole."""
    last: dict[str, Any] = bodies[-1]
    if len(bodies) == 1:
        return last
    ids: list[Any] = []
    pairs: list[Any] = []
    for body in bodies:
        made = body["meta_info"].get("completion_tokens")
        # Aborted out of its queue, a request is told its last token once more: those were counted already.
        if body is last and isinstance(made, int) and made < len(ids) + len(body["output_ids"]):
            continue
        ids += body["output_ids"]
        pairs += body["meta_info"]["output_token_logprobs"]
    return last | {"output_ids": ids, "meta_info": last["meta_info"] | {"output_token_logprobs": pairs}}


def _failure(error: Any) -> SampleFailure | WorkerFailure:
    """An error after the 200: its code means what a status would have."""
    code = error.get("code") if isinstance(error, dict) else None
    words = f"in the stream: {str(error)[:200]}"
    if isinstance(code, int) and code < _SERVER_ERRORS:
        return SampleFailure("rejected_by_engine", words)
    return WorkerFailure(f"http_{code}" if isinstance(code, int) else "stream_error", words, accepted=True)
