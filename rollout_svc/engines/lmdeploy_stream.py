"""LMDeploy's streamed answers: each event carries its own new tokens, the last one the finish reason.

Invariants:

- Pure. An event is read when it comes: what it brought is there even where the rest never does.
- What is returned was checked as a whole answer is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Completion
from rollout_svc.engines.sse import DONE
from rollout_svc.errors import SampleFailure, WorkerFailure

__all__ = ["LMDeployReader"]

_ABORTED: Final = {"type": "abort"}
_EXCERPT_CHARS: Final = 200  # of what the engine said, kept in an error message


class LMDeployReader:
    """Collects the events of one answer.

    Args:
        finished: makes the completion of ids, `[logprob, id]` pairs and a finish reason, each unchecked.
        failed: makes the failure that a status and its words mean.
    """

    __slots__ = ("_ended", "_failed", "_finish", "_finished", "_ids", "_pairs", "_problem")

    def __init__(
        self,
        finished: Callable[[list[Any], list[Any], Any], Completion],
        failed: Callable[[int, str], SampleFailure | WorkerFailure],
    ) -> None:
        self._finished = finished
        self._failed = failed
        self._ids: list[Any] = []
        self._pairs: list[Any] = []
        self._finish: Any = None
        self._ended = False
        self._problem: SampleFailure | WorkerFailure | None = None

    def feed(self, payload: bytes) -> None:
        """Take an event's tokens; after one that is no part of an answer nothing more is taken."""
        if payload == DONE:
            self._ended = True
        elif self._problem is None:
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        """Read one event. The last one may have no tokens, or the stop token."""
        try:
            event = orjson.loads(payload)
            if "error" in event:
                self._problem = self._failure(event["error"])
                return
            meta = event["meta_info"]
            ids, pairs, finish = event["output_ids"], meta["output_token_logprobs"], meta["finish_reason"]
            new_ids, new_pairs = [*ids], [] if pairs is None and not ids else [*pairs]
        except (ValueError, KeyError, TypeError) as error:
            words = f"{type(error).__name__}: {error}: {payload[:_EXCERPT_CHARS].decode('utf-8', 'replace')}"
            self._problem = SampleFailure("invalid_response", f"an event of a stream: {words}")
            return
        self._ids += new_ids
        self._pairs += new_pairs
        self._finish = finish or self._finish

    def _failure(self, error: Any) -> SampleFailure | WorkerFailure:
        """Read an error after the 200: its code means what a status would have."""
        code = error.get("code") if isinstance(error, dict) else None
        words = f"in the stream: {str(error)[:_EXCERPT_CHARS]}"
        return self._failed(code, words) if type(code) is int else WorkerFailure("stream_error", words, accepted=True)

    def completion(self) -> Completion:
        """Read the whole answer.

        Raises:
            SampleFailure: it is invalid, or the engine refused it in the stream.
            WorkerFailure: the engine said in the stream that it failed, or the stream ended before its answer did.
        """
        if self._problem is not None:
            raise self._problem
        if not self._ended or self._finish is None:
            raise WorkerFailure("cut_off", "the stream ended before its answer did", accepted=True)
        return self._finished(self._ids, self._pairs, self._finish)

    def partial(self) -> Completion | None:
        """What has come, as an abort; None where that is nothing or not valid."""
        try:
            completion = self._finished(self._ids, self._pairs, self._finish or _ABORTED)
        except SampleFailure:
            return None
        return completion if completion.ids else None
