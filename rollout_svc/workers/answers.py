"""What may be wrong with an answer that could be read: pure but for what a worker is told of itself.

Invariants:

- What is wrong with the answer alone is the sample's failure; what shows that the worker is not what it was let in as,
  or does what nobody asked for, is the worker's.
- Weights change only while nothing of ours runs there, or runs frozen: an answer has the version the worker was let in
  with, or that of its dispatch where it was on its way already.
"""

from __future__ import annotations

from rollout_svc.engines import Completion, GenerateRequest
from rollout_svc.errors import SampleFailure, WorkerFailure
from rollout_svc.workers.call import EngineCall
from rollout_svc.workers.worker import Worker

__all__ = ["refuse_other_weights", "refuse_own_abort", "refuse_what_was_not_asked"]


def refuse_what_was_not_asked(request: GenerateRequest, completion: Completion) -> None:
    """Compare an answer with its request; raises SampleFailure `invalid_response`."""
    if completion.request_id is not None and completion.request_id != request.request_id:
        raise SampleFailure("invalid_response", f"the answer to another request: {completion.request_id!r:.200}")
    if len(completion.ids) > request.max_tokens:
        raise SampleFailure(
            "invalid_response", f"{len(completion.ids)} tokens, but only {request.max_tokens} were asked for"
        )


def refuse_other_weights(worker: Worker, call: EngineCall, completion: Completion) -> None:
    """An engine that was restarted in silence answers with what it started with: it is out until it is looked at.

    Raises:
        WorkerFailure: `odd_version`.
    """
    if not completion.labelled or not completion.spans or worker.version is None:
        return
    found = completion.spans[-1].version
    if found not in (worker.version, call.version):
        message = f"{worker.worker_id} answered under version {found}; it was let in with {worker.version}"
        worker.restarted(message)
        raise WorkerFailure("odd_version", message)


def refuse_own_abort(worker: Worker, call: EngineCall, completion: Completion) -> None:
    """An abort that nobody sent, and that brought nothing; raises WorkerFailure `engine_abort`."""
    if completion.finish_reason == "abort" and not (completion.ids or completion.late or call.aborts):
        raise WorkerFailure("engine_abort", f"{worker.worker_id} aborted a request that nobody asked it to abort")
