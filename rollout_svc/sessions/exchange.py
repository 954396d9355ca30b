"""What a client of a session asks, and what it is answered, in no API's own words.

`openai.py` and `anthropic.py` read their requests into an `Asked`, and write an `Answer` in their shapes, whole or as a
stream; `session.py` makes the one of the other.

Invariant: values. Messages and tools are in OpenAI's form, which chat templates take.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from rollout_svc.tool_calls import Said

__all__ = ["Answer", "Asked", "End"]

End = Literal["stop", "length", "tool_calls"]


class Asked(NamedTuple):
    """One request for a turn.

    Attributes:
        messages: the whole conversation as the client has it, `role`, `content` (text) and, where they are there,
            `tool_calls`, `tool_call_id`, `name`; nothing else, so that two spellings of the same are equal.
        tools: that may be called, `{"type": "function", "function": {…}}`.
        max_tokens: of this turn; None: the task's.
        temperature: likewise.
        top_p: likewise.
        stop: texts that end the turn, beside the task's.
        stream: whether it is answered in parts.
        stream_usage: whether a stream tells its usage at the end.
        model: as the client named it; told back.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    model: str = ""


class Answer(NamedTuple):
    """One turn of the model.

    Attributes:
        answer_id: of this turn.
        said: its words and its calls.
        end: why it ended.
        prompt_tokens: of the whole prefix.
        completion_tokens: of this turn.
        stopped_by: of the texts that the client asked to stop at, the one that ended it; it is not in what was said.
    """

    answer_id: str
    said: Said
    end: End
    prompt_tokens: int
    completion_tokens: int
    stopped_by: str | None = None
