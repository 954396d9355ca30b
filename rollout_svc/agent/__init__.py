"""What an agent loop is given, and what it must do: `context.py` is the place to begin."""

from rollout_svc.agent.context import AgentContext
from rollout_svc.agent.turn import LOGPROBS_MODE, Agent, EngineCaller, OnPause, Turn
from rollout_svc.agent.words import Words
from rollout_svc.agent.work import CLEANUP_S, Work

__all__ = ["CLEANUP_S", "LOGPROBS_MODE", "Agent", "AgentContext", "EngineCaller", "OnPause", "Turn", "Words", "Work"]
