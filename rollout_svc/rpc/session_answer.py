"""The records of sessions, as `/openapi.json` describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rollout_svc.rpc.record import Natural, Record

__all__ = ["AsSpoken", "RewardNoted", "SessionEnded", "SessionRecord", "SessionsRecord"]


class SessionsRecord(Record):
    """Sessions of agents that speak an API of their own."""

    open: Natural
    max: Natural
    waiting_for_agent: Natural
    """Those that somebody may take by `POST /sessions`."""
    turns_under_way: Natural
    opened: Natural
    """Since the start."""
    turns: Natural
    """That were answered."""
    expired: Natural
    """Sessions that nobody used for too long, or whose agent took too long."""
    cancelled_turns: Natural
    """That nobody waited for any more."""


class SessionRecord(Record):
    """A session that was taken."""

    session_id: str
    base_url: str
    """For OpenAI's clients; Anthropic's take it without `/v1`."""
    api_key: str
    sample_id: str
    prompt: Any
    """Messages or text, as the prompt's line has it; else token ids."""
    ground_truth: Any = None


class RewardNoted(Record):
    """The reward a session's judger will see."""

    session_id: str
    reward: float


class SessionEnded(Record):
    """A session that is over."""

    session_id: str
    turns: Natural


class AsSpoken(BaseModel):
    """An answer in the words of the API that is spoken."""

    model_config = ConfigDict(extra="allow")
