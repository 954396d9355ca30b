"""The routes of the control API: one table, of which both the application and `/openapi.json` are made.

Invariant: what a route names is what it is given: a body or query that is not named is not read, one with another media
type is told whether that is wanted, and a name in braces in the path is the last argument of its call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel

from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.rpc import answers, bodies, calls, pause_answer, session_answer, session_calls
from rollout_svc.rpc.batch_answer import BatchRecord
from rollout_svc.rpc.evaluation_answer import EvaluationRecord
from rollout_svc.rpc.memory_answer import MemoryRecord
from rollout_svc.rpc.stuck_answer import StuckRecord
from rollout_svc.rpc.weights_answer import WeightsUpdated

__all__ = ["ROUTES", "Route"]


@dataclass(frozen=True, slots=True)
class Route:
    """One call.

    Attributes:
        method: HTTP method; GET answers HEAD as well.
        path: with names in braces.
        call: what it does (`calls`); its docstring is the summary.
        answer: the record it answers with; None: text.
        body: the model of its body; None: it is not read.
        query: the model of what the address carries after `?`; None: it is not read.
        status: of an answer that is no refusal.
        also: other statuses that come with the same record.
        refusals: types of refusal by status, beside those every such route has.
        guarded: whether it wants the token, where there is one.
        media: another media type it answers in where the caller asks for that; None: JSON only.
        binary: the media type it answers in, whatever the caller asks for; None: a record, or text.
        keyed: a session's own key opens it: its call is given the request, to find the session and to read the body.
        spoken: it is a call of an API that agents speak, whose refusals have shapes of their own.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    call: Callable[..., Awaitable[Any]]
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    status: int = 200
    also: tuple[int, ...] = ()
    refusals: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    guarded: bool = True
    media: str | None = None
    binary: str | None = None
    keyed: bool = False
    spoken: bool = False


_ALIVE: Final = ("failed", "stopping")  # of a 503: refused by a service that is not there any more
_RUNNING: Final = (*_ALIVE, "starting")  # of a 503: needs the engines
_SESSION: Final = {404: ("not_found",), 410: ("session_over",)}
_TURN: Final = {**_SESSION, 422: ("invalid_response",), 503: ("paused", "starting")}
_TICKETS: Final = ("stale_ticket",)

ROUTES: Final = (
    Route("GET", "/healthz", calls.healthz, answers.Health, also=(500,), guarded=False),
    Route("GET", "/readyz", calls.readyz, answers.Health, also=(503,), guarded=False),
    Route("GET", "/metrics", calls.metrics, None, refusals={404: ("not_found",)}),
    Route("GET", "/openapi.json", calls.document, answers.Document),
    Route("GET", "/v1/status", calls.status, answers.Status, refusals={503: ("starting",)}),
    Route(
        *("GET", "/v1/stuck", calls.stuck, StuckRecord),
        query=bodies.Stuck,
        refusals={400: ("bad_request",), 503: ("starting",)},
    ),
    Route("GET", "/v1/memory", calls.memory, MemoryRecord, refusals={503: ("starting",)}),
    Route(
        *("POST", "/v1/pause", calls.pause, pause_answer.Report),
        body=bodies.Pause,
        refusals={409: (*_TICKETS, "frozen"), 503: _RUNNING},
    ),
    Route(
        *("POST", "/v1/resume", calls.resume, answers.Status),
        body=bodies.Resume,
        refusals={409: (*_TICKETS, "weight_version"), 503: _RUNNING},
    ),
    Route(
        *("POST", "/v1/batches", calls.take_batch, BatchRecord),
        body=bodies.Batch,
        media=MEDIA_TYPE,
        refusals={
            409: ("lease_expired", "experts_differ"),
            503: ("not_enough", "paused", "exhausted", "failed", "starting"),
        },
    ),
    Route(
        *("POST", "/v1/batches/{id}/ack", calls.ack, answers.Acked),
        body=bodies.Ack,
        refusals={404: ("not_found",), 409: ("lease_expired",), 503: (*_ALIVE, "starting")},
    ),
    Route(
        *("GET", "/v1/tensors/{sample_id}", calls.tensors, None),
        binary=MEDIA_TYPE,
        refusals={404: ("not_found", "no_experts"), 503: ("starting",)},
    ),
    Route(
        *("POST", "/v1/prompts", calls.put_prompts, answers.Accepted),
        body=bodies.Prompts,
        refusals={404: ("not_found",), 409: ("conflict",), 503: (*_ALIVE, "starting")},
    ),
    Route(
        *("POST", "/v1/checkpoints", calls.checkpoint, answers.Checkpointed),
        body=bodies.Checkpoint,
        refusals={409: ("no_journal", "exists"), 503: (*_ALIVE, "starting", "checkpoint_failed")},
    ),
    Route(
        *("POST", "/v1/weights", calls.update_weights, WeightsUpdated),
        body=bodies.Weights,
        refusals={
            409: (*_TICKETS, "frozen", "not_paused", "not_drained", "updating", "asleep", "old_version"),
            503: (*_RUNNING, "update_failed"),
        },
    ),
    Route(
        *("POST", "/v1/evaluations", calls.evaluate, EvaluationRecord),
        body=bodies.Evaluation,
        refusals={
            404: ("not_found",),
            409: ("weight_version", "version_changed"),
            503: ("not_enough", "paused", *_RUNNING),
        },
    ),
    Route(
        *("POST", "/sessions", session_calls.open_session, session_answer.SessionRecord),
        body=bodies.OpenSession,
        refusals={404: ("not_found",), 409: ("conflict",), 503: ("no_sample", *_RUNNING)},
    ),
    Route(
        *(
            "POST",
            "/sessions/{session_id}/v1/chat/completions",
            session_calls.chat_completions,
            session_answer.AsSpoken,
        ),
        keyed=True,
        spoken=True,
        body=bodies.AsSpoken,
        media="text/event-stream",
        refusals=_TURN,
    ),
    Route(
        *("POST", "/sessions/{session_id}/v1/messages", session_calls.messages, session_answer.AsSpoken),
        keyed=True,
        spoken=True,
        body=bodies.AsSpoken,
        media="text/event-stream",
        refusals=_TURN,
    ),
    Route(
        *("GET", "/sessions/{session_id}/v1/models", session_calls.models, session_answer.AsSpoken),
        keyed=True,
        spoken=True,
        refusals={**_SESSION, 503: ("starting",)},
    ),
    Route(
        *("POST", "/sessions/{session_id}/reward", session_calls.report_reward, session_answer.RewardNoted),
        keyed=True,
        body=bodies.ReportReward,
        refusals={**_SESSION, 503: ("starting",)},
    ),
    Route(
        *("POST", "/sessions/{session_id}/end", session_calls.end_session, session_answer.SessionEnded),
        keyed=True,
        body=bodies.EndSession,
        refusals={**_SESSION, 503: ("starting",)},
    ),
    Route("GET", "/v1/concurrency", calls.concurrency, answers.Plan, refusals={503: ("starting",)}),
    Route(
        *("PUT", "/v1/concurrency", calls.set_concurrency, answers.Plan),
        body=bodies.Concurrency,
        refusals={503: (*_ALIVE, "starting")},
    ),
    Route("GET", "/v1/workers", calls.workers, answers.Workers, refusals={503: ("starting",)}),
    Route(
        *("POST", "/v1/workers", calls.add_worker, answers.WorkerRecord),
        body=bodies.Worker,
        status=201,
        refusals={409: ("duplicate", "no_port"), 503: (*_ALIVE, "starting")},
    ),
    Route(
        *("DELETE", "/v1/workers/{id}", calls.remove_worker, answers.Removed),
        status=202,
        refusals={404: ("not_found",), 503: (*_ALIVE, "starting")},
    ),
)
