"""What models say, and what clients send that is no request: for properties of how APIs are read and written."""

import json
from typing import Any

from hypothesis import strategies as st

from rollout_svc.sessions.exchange import Answer, Asked, End
from rollout_svc.tool_calls import read_said

__all__ = ["answered", "answers", "broken", "spelled"]

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_ARGUMENTS = st.dictionaries(st.sampled_from(["a", "unreadable_arguments", "ü"]), _VALUES, max_size=2)
_CALLS = st.fixed_dictionaries({"name": st.sampled_from(["add", "", "søk"]), "arguments": _ARGUMENTS | _VALUES})
_BODIES = _CALLS.map(json.dumps) | _VALUES.map(json.dumps) | st.text(max_size=20)
_WRITTEN = st.lists(st.text(max_size=30) | _BODIES.map("<tool_call>{}</tool_call>".format), max_size=4).map("".join)


def answered(text: str, turn: int = 0, end: End = "stop") -> Answer:
    """Make the answer of a turn whose text is given."""
    said = read_said(text, turn)
    return Answer(f"s-{turn}", said, "tool_calls" if said.calls else end, 7, 3)


def answers() -> st.SearchStrategy[Answer]:
    """Answers of all kinds."""
    ends: st.SearchStrategy[End] = st.sampled_from(("stop", "length"))
    return st.builds(answered, _WRITTEN | st.text(min_size=500, max_size=1200), st.integers(0, 3), ends)


def spelled(asked: Asked, answer: Answer, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation as a service knows it, after an answer and what was said to it."""
    return [*asked.messages, answer.said.as_message(), *more]


_JUNK: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({}) | st.just([None])
)


def broken(bodies: list[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of requests one field of which, however deep, is something else."""

    @st.composite
    def one(draw: st.DrawFn) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(json.dumps(draw(st.sampled_from(bodies))))
        there: Any = body
        while True:
            places = list(there) if isinstance(there, dict) else list(range(len(there)))
            place = draw(st.sampled_from(places))
            inner = there[place]
            if not (isinstance(inner, dict | list) and inner and draw(st.integers(0, 3))):
                there[place] = draw(_JUNK)
                return body
            there = inner

    return one()
