"""Synchronous judgers, and tools, in processes that can be killed."""

from rollout_svc.judging.processes.pool import JudgePool, JudgerError

__all__ = ["JudgePool", "JudgerError"]
