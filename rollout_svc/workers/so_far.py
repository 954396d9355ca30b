"""What has come of an answer that is still being streamed.

Invariant: looking changes nothing, neither the call nor what is believed of its worker.
"""

from __future__ import annotations

from rollout_svc.segment import Segment, VersionSpan
from rollout_svc.workers.worker import EngineCall, Worker

__all__ = ["so_far"]


def so_far(worker: Worker, call: EngineCall, turn: int) -> Segment | None:
    """The tokens of a call under way, as a segment of `turn`.

    None where none have come, where they are not to be believed, and where the engine has said how it ended: the answer
    is about to arrive, and nothing may be generated after it.
    """
    if call.reader is None or worker.calls.get(call.request_id) is not call:
        return None
    partial = call.reader.partial()
    if partial is None or partial.finish_reason != "abort" or len(partial.ids) > call.max_tokens:
        return None
    if partial.request_id not in (None, call.request_id):
        return None
    spans = partial.spans
    if not spans:
        version = call.version if call.version == worker.version else None
        spans = (VersionSpan(version, 0, len(partial.ids), confirmed=False),)
    elif partial.labelled and worker.version is not None and spans[-1].version not in (worker.version, call.version):
        return None
    return Segment(partial.ids, partial.logprobs, spans, turn=turn)
