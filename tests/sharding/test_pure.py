"""What is merged, and dealt out, over shards."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.ledger import ACCOUNTS, SETTLED
from rollout_svc.rollout.rewards import RewardSum
from rollout_svc.sharding.accounts import EMPTY, ledger_sum, settled_in
from rollout_svc.sharding.figures import merge_figures
from rollout_svc.sharding.naming import joined, split
from rollout_svc.sharding.reports import Silence, merge_reports
from rollout_svc.sharding.shares import home_of, share_out

COUNTS = st.dictionaries(st.sampled_from(["s0", "s1", "s2", "s3"]), st.integers(0, 50), min_size=1)


@given(st.integers(0, 300), COUNTS)
def test_a_batch_is_shared_out_in_proportion(number: int, has: dict[str, int]) -> None:
    """All that can be given is given, nobody gives more than it has, and each its part of it, up to one."""
    given_out = share_out(number, has)
    total = sum(has.values())
    assert sum(given_out.values()) == min(number, total)
    for shard, count in has.items():
        assert 0 <= given_out[shard] <= count
        if number < total:
            assert abs(given_out[shard] - number * count / total) < 1


def test_a_prompt_has_one_home() -> None:
    """A prompt's home never changes, and the prompts of a task are spread over all shards."""
    homes = [home_of("t", f"p{number}", 4) for number in range(4000)]
    assert homes == [home_of("t", f"p{number}", 4) for number in range(4000)]
    assert all(800 < homes.count(shard) < 1200 for shard in range(4))
    assert home_of("t", "p0", 1) == 0


def test_a_home_is_the_same_in_every_process() -> None:
    """The hash is not Python's, which is another in each process: the same id is accepted once, after a restart too."""
    assert [home_of("arithmetic", name, 5) for name in ("a", "b", "c", "d")] == [2, 2, 0, 3]


@given(st.from_regex(r"s[0-9]{1,3}", fullmatch=True), st.text(min_size=1))
def test_names_come_apart_again(shard: str, name: str) -> None:
    """A worker's name over all shards is its shard's and its own."""
    assert split(joined(shard, name)) == (shard, name)


BOOK = st.fixed_dictionaries({str(name): st.integers(0, 99) for name in ACCOUNTS}).map(
    lambda counts: {"admitted": sum(counts.values()), **counts}
)
LEDGER = st.fixed_dictionaries(
    {"groups": BOOK, "samples": BOOK, "late_discarded": st.integers(0, 9), "redone": st.integers(0, 9)}
)


@given(st.lists(LEDGER, max_size=5))
def test_the_sum_of_ledgers_balances(ledgers: list[dict[str, Any]]) -> None:
    """P1: the sum of books that balance balances, and nothing is counted twice or forgotten."""
    total = ledger_sum(ledgers)
    assert list(total) == ["groups", "samples", "late_discarded", "redone"]
    for unit in ("groups", "samples"):
        assert total[unit]["admitted"] == sum(total[unit][name] for name in ACCOUNTS)
        for name, number in total[unit].items():
            assert number == sum(ledger[unit][name] for ledger in ledgers)
    assert total["redone"] == sum(ledger["redone"] for ledger in ledgers)


@given(LEDGER, LEDGER)
def test_what_was_settled_outlives_its_life(before: dict[str, Any], after: dict[str, Any]) -> None:
    """P1: after the loss of a shard without a journal the sum balances, and no settled account has fallen."""
    total = ledger_sum([settled_in(before), after])
    for unit in ("groups", "samples"):
        assert total[unit]["admitted"] == sum(total[unit][name] for name in ACCOUNTS)
        assert all(total[unit][name] == before[unit][name] + after[unit][name] for name in SETTLED)
        assert all(total[unit][name] == after[unit][name] for name in set(ACCOUNTS) - SETTLED)
    assert ledger_sum([EMPTY, after]) == after


REWARDS = st.lists(st.floats(-10, 10), max_size=8)


def figures_of(rewards: list[float], lengths: list[int]) -> dict[str, Any]:
    """The figures of a part with these rewards, one group a sample."""
    added = RewardSum.of(rewards)
    one = {
        "groups": len(lengths),
        "samples": len(lengths),
        "reward_mean": added.mean if rewards else None,
        "reward_std": added.std if rewards else None,
        "reward_samples": len(rewards),
        "response_length_mean": sum(lengths) / len(lengths) if lengths else None,
        "response_length_min": min(lengths, default=None),
        "response_length_max": max(lengths, default=None),
        "staleness": {"0": len(lengths)} if lengths else {},
        "mixed_versions": 1,
        "masked_tokens": 2,
    }
    rest = {"aborted": 1, "continued": 2, "redone": 3, "failed": {"x": 1}, "settled": {"filtered": 2}}
    return {**one, **rest, "wait_s": 1.0, "pause_s": 2.0, "tasks": {"t": one}, "max_token_staleness": 3}


@given(st.lists(st.tuples(REWARDS, st.lists(st.integers(0, 99), max_size=5)), min_size=1, max_size=4))
def test_figures_are_those_of_one_batch(parts: list[tuple[list[float], list[int]]]) -> None:
    """The figures of parts, merged, are those of one batch with all their groups."""
    merged = merge_figures([figures_of(*part) for part in parts], 5.0, 6.0)
    rewards = [reward for part, _ in parts for reward in part]
    lengths = [length for _, part in parts for length in part]
    whole = figures_of(rewards, lengths)
    for told, meant in ((merged, whole), (merged["tasks"]["t"], whole["tasks"]["t"])):
        for name in ("groups", "samples", "reward_samples", "response_length_min", "response_length_max", "staleness"):
            assert told[name] == meant[name]
        for name in ("reward_mean", "reward_std", "response_length_mean"):
            assert (told[name] is None) == (meant[name] is None)
            assert meant[name] is None or abs(told[name] - meant[name]) < 1e-6
    assert merged["failed"] == {"x": len(parts)}
    assert merged["settled"] == {"filtered": 2 * len(parts)}
    assert (merged["wait_s"], merged["pause_s"], merged["max_token_staleness"]) == (5.0, 6.0, 3)
    assert set(merged) == set(whole)


def report_of(in_flight: int, abandoned: int, gate_s: float) -> dict[str, Any]:
    """The record of a shard's pause with one worker."""
    tally = {
        "in_flight": in_flight,
        "answered": 0,
        "late": 0,
        "cancelled": in_flight - abandoned,
        "abandoned": abandoned,
        "residual": abandoned,
    }
    return {
        "ticket": 7,
        "rungs": [
            {"name": "gate", "at_s": gate_s, "pending": in_flight},
            {"name": "report", "at_s": 1.0, "pending": abandoned},
        ],
        "workers": {"w0": tally},
        "parked": ["p"],
        "abandoned": [{"sample_id": "x", "worker": "w0", "age_s": 1.0}] * abandoned,
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4), st.integers(0, 2))
def test_a_report_is_clean_when_every_shard_is(shards: list[tuple[int, int]], silent: int) -> None:
    """P9: a shard that abandoned something, or said nothing, makes the whole report not clean, and is named in it."""
    reports = {f"s{n}": report_of(max(pair), min(pair), n / 100) for n, pair in enumerate(shards)}
    silences = {f"q{n}": Silence(2.0, {"w0": 3} if n else {}) for n in range(silent)}
    record = merge_reports(4, "abort", 1.5, reports, silences, ledger_sum(())).as_json()
    assert record["clean"] == (silent == 0 and all(min(pair) == 0 for pair in shards))
    assert record["ticket"] == 4
    named = {one["worker"] for one in record["abandoned"]}
    assert named == {f"s{n}.w0" for n, pair in enumerate(shards) if min(pair)} | set(["q0", "q1.w0"][:silent])
    assert sum(tally["in_flight"] for tally in record["workers"].values()) == sum(map(max, shards)) + 3 * (silent == 2)
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    if shards:
        assert rungs["gate"] == {"name": "gate", "at_s": (len(shards) - 1) / 100, "pending": sum(map(max, shards))}
        assert rungs["report"]["pending"] == sum(map(min, shards))
