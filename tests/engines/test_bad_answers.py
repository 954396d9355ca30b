"""Answers that are none, in every dialect: whatever stands where an answer should, its own sample fails, typed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollout_svc.engines import Dialect, LMDeployDialect, Reply, SGLangDialect, VLLMDialect
from rollout_svc.errors import SampleFailure

PAIRED = (LMDeployDialect(), SGLangDialect())
"""Dialects whose logprobs come in pairs with their ids."""
ALL = (*PAIRED, VLLMDialect())


def named(dialect: Dialect) -> str:
    return dialect.name


in_all = pytest.mark.parametrize("dialect", ALL, ids=named)
in_paired = pytest.mark.parametrize("dialect", PAIRED, ids=named)


def failure(dialect: Dialect, reply: Reply) -> SampleFailure:
    """Parse what must fail as the sample's own failure."""
    with pytest.raises(SampleFailure) as caught:
        dialect.parse_generate(reply)
    return caught.value


def answer(**changes: Any) -> Reply:
    """The least that is an answer, with other ids, logprobs or finish reason, or other keys of its meta_info."""
    ids = changes.pop("output_ids", [1])
    pairs = [[-1.0, token] for token in ids] if isinstance(ids, list) else [[-1.0, 1]]
    meta = {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs} | changes
    return Reply(200, json.dumps({"output_ids": ids, "meta_info": changes.get("meta_info", meta)}).encode())


def invalid(dialect: Dialect, reply: Reply) -> bool:
    return failure(dialect, reply).reason == "invalid_response"


@in_paired
def test_the_least_that_is_an_answer(dialect: Dialect) -> None:
    """Ids, logprobs and a finish reason are all that is needed."""
    assert dialect.parse_generate(answer()).ids == [1]


@in_paired
@pytest.mark.parametrize("status", [0, 100, 201, 204, 206, 301, 302, 307, 399])
def test_statuses_nobody_asked_for(dialect: Dialect, status: int) -> None:
    """A status that is neither an answer nor an error is an invalid response."""  # P4
    assert invalid(dialect, Reply(status, b""))


@in_all
@pytest.mark.parametrize("raw", [b"", b"not json", b"{", b"\xff\xfe", b"null", b"[]", b"7", b'"x"', b"{}", b"[1,2]"])
def test_garbage(dialect: Dialect, raw: bytes) -> None:
    """What is no JSON object with the right keys is an invalid response."""  # P4
    assert invalid(dialect, Reply(200, raw))


@in_paired
@pytest.mark.parametrize("key", ["output_ids", "meta_info", "finish_reason", "output_token_logprobs"])
@pytest.mark.parametrize("value", [None, 7, "x", [], {}, True, [None], ["x"], [[]], {"type": None}])
def test_fields_of_the_wrong_kind(dialect: Dialect, key: str, value: object) -> None:
    """Wherever the wrong kind of value stands, the answer is invalid and nothing else happens."""  # P4
    pairs = {"output_token_logprobs": [[-1.0, 1]]} if key == "output_ids" else {}
    assert invalid(dialect, answer(**{key: value}, **pairs))


@in_paired
@pytest.mark.parametrize(
    "kind", ["error", "repetition", "", "STOP", None, 3, [], ["stop"], {"type": "stop"}, True], ids=repr
)
def test_unknown_finish_reasons(dialect: Dialect, kind: object) -> None:
    """A finish reason we do not know, whatever it is made of, ends that sample alone."""  # P4
    assert invalid(dialect, answer(finish_reason={"type": kind}))


@in_paired
@pytest.mark.parametrize(
    "value", [None, "x", "-1.5", True, [], {}, float("nan"), float("inf"), float("-inf"), 1.5], ids=repr
)
def test_logprobs_are_finite_numbers(dialect: Dialect, value: object) -> None:
    """A logprob that is none (a raw logit, say) makes the whole answer invalid."""  # P4
    assert invalid(dialect, answer(output_ids=[1, 2], output_token_logprobs=[[-1.0, 1], [value, 2]]))


@in_paired
@pytest.mark.parametrize("token", [-1, 1.0, 1.5, None, "1", True, False, [1], 2**64, 1e30], ids=repr)
def test_ids_are_integers_from_zero(dialect: Dialect, token: object) -> None:
    """An id that is no integer >= 0 makes the whole answer invalid."""  # P4
    assert invalid(dialect, answer(output_ids=[5, token]))


@in_paired
@pytest.mark.parametrize(
    "pairs",
    [
        *(None, [], [[-1.0, 1]], [[-1.0, 1], [-1.0, 2], [-1.0, 3]]),
        *([[-1.0, 1], [-1.0, 3]], [[-1.0, 2], [-1.0, 1]], [[-1.0], [-1.0]]),
    ],
)
def test_logprobs_belong_to_the_ids(dialect: Dialect, pairs: list[list[float]] | None) -> None:
    """None, too few, too many, of other ids, in another order, or without ids: invalid."""  # P4
    assert invalid(dialect, answer(output_ids=[1, 2], output_token_logprobs=pairs))


@in_all
def test_a_long_foreign_body_is_not_kept_whole(dialect: Dialect) -> None:
    """An error message quotes the beginning of what came, whatever its size and encoding."""
    assert len(str(failure(dialect, Reply(400, b"\xff" * 100_000)))) < 500
