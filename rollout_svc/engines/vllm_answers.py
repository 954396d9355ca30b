"""What vLLM answers to a generation: whole, or as a stream of deltas.

Invariants:

- Tokens are kept only with their logprobs: one for each id, of that id, finite, and not vLLM's stand-in for none.
- A stream's tokens are checked as they come, so what `partial` returns is as good as a whole answer.
- Weight labels come with the last chunk alone: a partial answer is unlabelled.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from rollout_svc.engines.calls import Completion, Reply
from rollout_svc.engines.parsing import OK, check_numbers, excerpt, failure_of, spans_of
from rollout_svc.engines.sse import DONE
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.segment import FinishReason

__all__ = ["ID_PREFIX", "VLLMStream", "completion_of"]

ID_PREFIX: Final = "generate-tokens-"
"""What vLLM puts before the id of a request (`scale_out/token_in_token_out/serving.py`)."""
_NOT_FOUND: Final = 404
# `repetition` is a stop the sampling asked for (`repetition_detection`); `error` is the engine's own trouble.
_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}
_NO_LOGPROB: Final = -9999.0  # vLLM writes NaN, -infinity and "not known" as this: such a token cannot be trained on


def completion_of(reply: Reply, *, labels: bool = True) -> Completion:
    """Read a whole answer.

    Args:
        reply: of `POST /inference/v1/generate`.
        labels: whether this engine's weights can be labelled; else its constant label says nothing.

    Raises:
        WorkerFailure: 401, 403, 429, 5xx, and 404 unless it is the model the request named that is not there.
        SampleFailure: any other status, or a body that is not a valid completion.
    """
    if reply.status != OK:
        raise _failure(reply)
    try:
        body = orjson.loads(reply.body)
        (choice,) = body["choices"]
        finish = _finish(choice["finish_reason"])
        ids, logprobs = _tokens(choice)
        reported, request_id = choice.get("weight_versions"), body.get("request_id")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SampleFailure("invalid_response", f"{type(error).__name__}: {error}: {excerpt(reply)}") from error
    return _completion(ids, logprobs, finish, reported if labels else None, request_id)


def _failure(reply: Reply) -> WorkerFailure | SampleFailure:
    """A model that is not there is named by the prompt (`engine_extra`): not the worker's fault."""
    if reply.status == _NOT_FOUND and _error_field(reply.body, "param") == "model":
        return SampleFailure("rejected_by_engine", f"HTTP 404: {excerpt(reply)}")
    return failure_of(reply)


def _error_field(body: bytes, name: str) -> Any:
    try:
        return orjson.loads(body)["error"][name]
    except (ValueError, KeyError, TypeError):
        return None


def _finish(reason: Any) -> str:
    """A finish reason of vLLM's; `error` is its own failing and may go better elsewhere."""
    if reason == "error":
        raise WorkerFailure("engine_error", "the engine ended the request with finish reason 'error'")
    if not isinstance(reason, str) or reason not in _FINISH:
        raise SampleFailure("invalid_response", f"unknown finish reason {reason!r:.200}")
    return reason


def _tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Read ids and their logprobs; raises SampleFailure, or what indexing raises where a field is of another kind."""
    ids: list[int] = choice["token_ids"]
    content = choice["logprobs"]["content"]
    logprobs: list[float] = [entry["logprob"] for entry in content]
    if [entry["token_id"] for entry in content] != ids:
        raise SampleFailure("invalid_response", "logprobs do not belong to token_ids")
    check_numbers(ids, logprobs)
    if logprobs and min(logprobs) <= _NO_LOGPROB:
        raise SampleFailure("invalid_response", f"a logprob of {_NO_LOGPROB}: NaN or -infinity, as vLLM writes them")
    return ids, logprobs


def _completion(ids: list[int], logprobs: list[float], finish: str, reported: Any, request_id: Any) -> Completion:
    if isinstance(request_id, str):
        request_id = request_id.removeprefix(ID_PREFIX)
    return Completion(
        ids=ids,
        logprobs=logprobs,
        finish_reason=_FINISH[finish],
        engine_finish_reason=finish,
        spans=spans_of(reported, len(ids)) if reported and ids else (),
        request_id=request_id,
        labelled=bool(reported),
    )


class VLLMStream:
    """Reads `data:` payloads of one generation: deltas, then `[DONE]`."""

    def __init__(self, *, labels: bool = True) -> None:
        self._labels = labels
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._finish: str | None = None
        self._versions: Any = None
        self._request_id: Any = None
        self._failure: WorkerFailure | SampleFailure | None = None

    def feed(self, payload: bytes) -> None:
        """Take one payload; what is wrong with it is told by `completion`, and nothing after it is read."""
        if self._failure is not None or payload == DONE:
            return
        try:
            self._read(orjson.loads(payload))
        except (WorkerFailure, SampleFailure) as failure:
            self._failure = failure
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            text = f"{type(error).__name__}: {error}: {excerpt(Reply(OK, payload))}"
            self._failure = SampleFailure("invalid_response", text)

    def _read(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:  # after the 200, an error is a payload like any other
            status = chunk["error"]["code"]
            raise _failure(Reply(status if type(status) is int and status != OK else 500, orjson.dumps(chunk)))
        if not chunk["choices"]:  # usage alone
            return
        (choice,) = chunk["choices"]
        if self._finish is not None:
            raise SampleFailure("invalid_response", "the stream went on after its finish reason")
        finish = None if choice["finish_reason"] is None else _finish(choice["finish_reason"])
        ids, logprobs = _tokens(choice)
        self._ids += ids
        self._logprobs += logprobs
        self._request_id = chunk.get("request_id")
        self._finish, self._versions = finish, choice.get("weight_versions")

    def completion(self) -> Completion:
        """The whole answer; raises as a whole answer's parser does, and WorkerFailure for a stream that was cut."""
        if self._failure is not None:
            raise self._failure
        if self._finish is None:
            made = len(self._ids)
            raise WorkerFailure(
                "cut_off", f"the stream ended after {made} tokens, before its answer did", accepted=True
            )
        return self._so_far(self._finish)

    def partial(self) -> Completion | None:
        """What was received so far, ended by `abort`; None where that is nothing, or where it was invalid."""
        if not self._ids or isinstance(self._failure, SampleFailure):
            return None
        return self._so_far(self._finish or "abort")

    def _so_far(self, finish: str) -> Completion:
        versions = self._versions if self._labels else None
        return _completion(list(self._ids), list(self._logprobs), finish, versions, self._request_id)
