"""What a judger is; judge calls made cancellable, bounded, off the loop: `calls.py` is the place to begin."""

from rollout_svc.errors import JudgeFailed
from rollout_svc.judging.calls import Judging
from rollout_svc.judging.desk import JudgeDesk
from rollout_svc.judging.values import (
    REPORTED,
    Ask,
    CallClock,
    JudgeCall,
    JudgedSample,
    JudgerError,
    ProcessRunner,
    Reward,
    TimedFuture,
)

__all__ = [
    "REPORTED",
    "Ask",
    "CallClock",
    "JudgeCall",
    "JudgeDesk",
    "JudgeFailed",
    "JudgedSample",
    "JudgerError",
    "Judging",
    "ProcessRunner",
    "Reward",
    "TimedFuture",
]
