"""What each dialect says to have memory given up and taken back; pure."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines import Call, Dialect, LMDeployDialect, Reply, SGLangDialect, VLLMDialect
from rollout_svc.engines.memory import TAGS, Asleep, Tag, in_order
from rollout_svc.errors import BadRequest
from rollout_svc.gate import LANES
from rollout_svc.pause.offload import read_offload

ALL = frozenset(TAGS)
CACHE: frozenset[Tag] = frozenset({"kv_cache"})


def said(calls: list[Call]) -> list[tuple[str, bytes | None]]:
    """Paths and bodies."""
    assert all(call.method == "POST" and call.admin for call in calls)
    return [(call.path, call.body) for call in calls]


def test_sglang_names_tags() -> None:
    """One call for all that goes; each tag comes back by a call of its own."""
    dialect = SGLangDialect()
    assert dialect.offloads(CACHE) == CACHE
    assert said(dialect.offload(ALL)) == [("/release_memory_occupation", b'{"tags":["weights","kv_cache"]}')]
    assert said(dialect.wake("weights")) == [("/resume_memory_occupation", b'{"tags":["weights"]}')]


def test_vllm_sleeps_as_a_whole() -> None:
    """Level and mode are always sent; it goes on by itself only where all of a sleep is back, so it is told to."""
    dialect = VLLMDialect()
    assert dialect.offloads(CACHE) == ALL
    assert said(dialect.offload(ALL)) == [("/sleep?level=1&mode=abort", None)]
    assert [path for path, _ in said(dialect.wake("weights"))] == ["/wake_up?tags=weights"]
    assert [path for path, _ in said(dialect.wake("kv_cache"))] == ["/wake_up?tags=kv_cache", "/resume"]


def test_lmdeploy_is_told_in_json() -> None:
    """Without a JSON content type, which a body gives it, it answers 400."""
    dialect = LMDeployDialect()
    assert dialect.offloads(CACHE) == ALL
    assert said(dialect.offload(ALL)) == [("/sleep?level=1", b"{}")]
    assert said(dialect.wake("kv_cache")) == [("/wakeup?tags=kv_cache", b"{}")]


@pytest.mark.parametrize("dialect", [VLLMDialect(), LMDeployDialect()])
def test_a_sleep_of_unknown_depth_is_not_believed_to_keep_weights(dialect: Dialect) -> None:
    """`is_sleeping` tells neither the level nor what is away."""
    assert dialect.parse_asleep(Reply(200, b'{"is_sleeping":true}')) == Asleep(ALL, kept=False)
    assert dialect.parse_asleep(Reply(200, b'{"is_sleeping":false}')) == Asleep(frozenset(), kept=False)


def test_only_the_built_in_engine_tells_what_it_released() -> None:
    """SGLang itself says nothing of it, and nothing is guessed."""
    dialect = SGLangDialect()
    assert dialect.parse_asleep(Reply(200, b"{}")) is None
    found = dialect.parse_asleep(Reply(200, orjson.dumps({"released_memory": ["kv_cache"]})))
    assert found == Asleep(CACHE, kept=True)


@given(st.lists(st.sampled_from([*TAGS, "disk"])))
def test_tags_are_read_in_the_order_of_waking(tags: list[str]) -> None:
    """Any number of known tags in any order is a set; an unknown one is refused by name."""
    if "disk" in tags:
        with pytest.raises(BadRequest, match="not 'disk'"):
            read_offload(tags, "abort", LANES, [])
    else:
        wanted = read_offload(tags, "abort", LANES, [])
        assert in_order(wanted) == [tag for tag in ("weights", "kv_cache") if tag in tags]
