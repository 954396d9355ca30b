"""What a tool takes: the schema of a signature, and arguments that are checked by it."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_agents.signatures import GivenSchema, Signature, described
from tests.support.tools import add, weather


def test_a_signature_becomes_a_schema() -> None:
    """Types, what is required, and what the docstring says of each argument."""
    assert described(add) == "Add two numbers."
    schema = Signature(add).schema
    assert schema["required"] == ["a"]
    assert schema["properties"]["a"] == {"type": "integer", "description": "the first."}
    assert Signature(weather).schema["properties"]["unit"]["enum"] == ["C", "F"]


def test_arguments_become_what_is_annotated() -> None:
    """A model that writes a number as text is understood; what is no number is told."""
    assert Signature(add).check({"a": "3"}) == {"a": 3}
    with pytest.raises(ValueError, match="a: Input should be a valid integer"):
        Signature(add).check({"a": "three"})


def open_one(first: list[int], **more: Any) -> None:
    """Take anything."""


def test_a_function_of_any_keywords_takes_any() -> None:
    """And what is annotated is checked all the same."""
    assert Signature(open_one).check({"first": [1], "x": 2}) == {"first": [1], "x": 2}
    with pytest.raises(ValueError, match="first"):
        Signature(open_one).check({"first": [None], "x": 2})


SCHEMAS = st.recursive(
    st.sampled_from(
        [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
        + [{"type": ["string", "null"]}, {"enum": ["a", "b"]}, {}]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(
            lambda properties, required, closed: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name in properties],
                **({"additionalProperties": False} if closed else {}),
            },
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.lists(st.sampled_from("abc"), unique=True),
            st.booleans(),
        ),
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([0.5, 2.0]), st.sampled_from(["a", "x"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from("abc"), SCHEMAS, max_size=3), st.dictionaries(st.sampled_from("abcd"), VALUES))
def test_a_given_schema_is_checked_as_json_schema_says(properties: dict[str, Any], value: dict[str, Any]) -> None:
    """For the keywords it knows it agrees with a library that knows all."""
    schema = {"type": "object", "properties": properties}
    try:
        GivenSchema(schema).check(value)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == jsonschema_rs.is_valid(schema, value)
