"""What an engine answers where that matters little, and which prompts came back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.sglang_core import Call
from tests.support.sglang_wire import Reply

__all__ = ["ids", "its_number", "two_tokens"]


def its_number(call: Call) -> Reply:
    """Answer at once, with the prompt's number as the only token."""
    return Reply(tokens=[call.prompt_ids[-1]])


def two_tokens(_: object) -> Reply:
    """Answer at once."""
    return Reply(tokens=2)


def ids(batch: Mapping[str, Any]) -> list[str]:
    """The prompts of a batch."""
    return [group["prompt"]["id"] for group in batch["groups"]]
