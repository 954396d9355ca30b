"""What shards a configuration makes, said before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError
from rollout_svc.observe.preflight_table import shard_lines
from rollout_svc.plan import make_plan
from rollout_svc.sharding.outlook import shard_outlook
from tests.sharding.test_split import whole


def outlook(shards: int, batches: list[int | None], **sections: Any) -> list[dict[str, Any]]:
    """What is said of so many shards over engines of these batches."""
    config = config_from_mapping(whole(shards, batches, **sections))
    return shard_outlook(config, make_plan(config.trainer, batches))


def test_a_line_for_each_shard() -> None:
    """Its groups of a batch, its requests at once, its journal, and which engines are its own, by both names."""
    told = outlook(2, [16, 16, 32], trainer={"train_batch_size": 8})
    assert [one["workers"] for one in told] == [{"s0.w0": "w2"}, {"s1.w0": "w0", "s1.w1": "w1"}]
    assert [one["groups"] for one in told] == [4, 4]
    lines = shard_lines(told)
    assert lines[1].startswith("shard s1: groups=4 limit=")
    assert lines[1].endswith(".s1 workers=w0=s1.w0,w1=s1.w1")


def test_of_one_loop_nothing_is_said() -> None:
    """A service without shards has none."""
    assert outlook(1, [16]) == []


def test_what_cannot_be_divided_is_refused() -> None:
    """P35: the error is that of the start, at the field."""
    with pytest.raises(ConfigError, match=r"producer\.shards"):
        outlook(2, [16, 16], trainer={"train_batch_size": 1})


@given(st.lists(st.sampled_from([4, 16, 64]), min_size=4, max_size=9), st.integers(1, 4))
def test_every_engine_is_one_shards(batches: list[int | None], count: int) -> None:
    """Over all shards each engine is named once, and the groups of a batch are the whole's."""
    told = outlook(count, batches, trainer={"train_batch_size": 16})
    if count > 1:
        named = [there for one in told for there in one["workers"].values()]
        assert sorted(named) == sorted(f"w{place}" for place in range(len(batches)))
        assert sum(one["groups"] for one in told) == 16
