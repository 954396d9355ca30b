"""Where a sample may stand, which moves there are, and the account each place is counted in.

Invariant: the values are the JSON spelling.

    INIT -> GENERATING -> GENERATED -> JUDGING -> COMPLETED -> CONSUMED
                |             |           |
                +--> ABORTED <+-----------+     ABORTED -> GENERATING | JUDGING (resume_at) | INIT (redone)
                +--> INIT (a failure with attempts left)
    any unsettled state -> FAILED | EXPIRED | FILTERED
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Literal

from rollout_svc.ledger import Account

__all__ = ["ACCOUNT_OF", "ARROWS", "DROPPED", "SETTLED_STATUSES", "ResumeAt", "SampleStatus"]

ResumeAt = Literal["generate", "judge"]


class SampleStatus(StrEnum):
    """Where a sample stands; the values are the JSON spelling."""

    INIT = "INIT"
    GENERATING = "GENERATING"
    GENERATED = "GENERATED"
    JUDGING = "JUDGING"
    COMPLETED = "COMPLETED"
    ABORTED = "ABORTED"
    CONSUMED = "CONSUMED"
    FAILED = "FAILED"
    EXPIRED = "EXPIRED"
    FILTERED = "FILTERED"


_S = SampleStatus
DROPPED: Final = frozenset({_S.FAILED, _S.EXPIRED, _S.FILTERED})
SETTLED_STATUSES: Final = DROPPED | {_S.CONSUMED}
ARROWS: Final[dict[SampleStatus, frozenset[SampleStatus]]] = {
    _S.INIT: frozenset({_S.GENERATING}) | DROPPED,
    _S.GENERATING: frozenset({_S.GENERATED, _S.ABORTED, _S.INIT}) | DROPPED,
    _S.GENERATED: frozenset({_S.JUDGING, _S.ABORTED}) | DROPPED,
    _S.JUDGING: frozenset({_S.COMPLETED, _S.ABORTED}) | DROPPED,
    _S.ABORTED: frozenset({_S.GENERATING, _S.JUDGING, _S.INIT}) | DROPPED,
    _S.COMPLETED: frozenset({_S.CONSUMED}) | DROPPED,
    **{settled: frozenset() for settled in SETTLED_STATUSES},
}
ACCOUNT_OF: Final[dict[SampleStatus, Account]] = {
    _S.INIT: "queued",
    _S.GENERATING: "in_flight",
    _S.GENERATED: "in_flight",
    _S.JUDGING: "in_flight",
    _S.ABORTED: "aborted",
    _S.COMPLETED: "ready",
    _S.CONSUMED: "consumed",
    _S.FAILED: "failed",
    _S.EXPIRED: "expired",
    _S.FILTERED: "filtered",
}
