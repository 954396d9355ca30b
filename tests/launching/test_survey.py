"""What a cluster lacks: only what is certain, and always by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import Config, Resources
from rollout_svc.launching.cluster.placing import Layout
from rollout_svc.launching.cluster.room import summed
from rollout_svc.launching.cluster.survey import lacking, survey

NAMES = st.sampled_from(["CPU", "GPU", "at-1"])
BUNDLES = st.lists(st.dictionaries(NAMES, st.sampled_from([0.1, 0.5, 1.0, 4.0]), min_size=1), min_size=1, max_size=6)
STRATEGIES = st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])


def layout(*bundles: Resources, strategy: str = "PACK") -> Layout:
    """Lay engines out, one for each bundle."""
    return Layout(bundles, strategy, {f"w{index}": index for index in range(len(bundles))})


@given(BUNDLES, STRATEGIES, st.data())
def test_what_can_be_placed_is_let_through(bundles: list[Resources], strategy: str, data: st.DataObject) -> None:
    """Nodes that hold exactly what some placement puts on them lack nothing, by any strategy that allows it."""
    if strategy == "STRICT_PACK":
        places = [0] * len(bundles)
    elif strategy == "STRICT_SPREAD":
        places = list(range(len(bundles)))
    else:
        places = [data.draw(st.integers(0, 2)) for _ in bundles]
    count = max(3, len(bundles))
    nodes = [summed([b for b, at in zip(bundles, places, strict=True) if at == node]) for node in range(count)]
    assert lacking(nodes, layout(*bundles, strategy=strategy)) == []


@given(BUNDLES, st.integers(0, 5))
def test_an_engine_that_no_node_can_hold_is_named(bundles: list[Resources], chosen: int) -> None:
    """By its place in the configuration, with what it wants."""
    chosen %= len(bundles)
    bundles[chosen] = bundles[chosen] | {"GPU": 64.0}
    problems = lacking([summed(bundles) | {"GPU": 8.0}] * 9, layout(*bundles))
    assert [problem.path for problem in problems] == [f"workers.{chosen}.launch.resources"]
    assert "GPU 64" in problems[0].message


def test_engines_that_fit_alone_and_not_together_are_too_many() -> None:
    """The sum is held against the sum, and each strategy against its own rule."""
    nodes = [{"CPU": 2.0, "GPU": 1.0}, {"CPU": 2.0, "GPU": 1.0}]
    three = [{"CPU": 1.0, "GPU": 1.0}] * 3
    assert [str(problem) for problem in lacking(nodes, layout(*three))] == [
        "cluster: the engines want GPU 3, and all nodes together have GPU 2"
    ]
    packed = lacking(nodes, layout(*three[:2], strategy="STRICT_PACK"))
    assert [problem.path for problem in packed] == ["cluster.strategy"]
    spread = lacking(nodes, layout(*[{"CPU": 0.5}] * 3, strategy="STRICT_SPREAD"))
    assert "3 engines, each on a node of its own, and 2 nodes" in str(spread[0])


@pytest.mark.unconnected
async def test_a_configuration_without_a_cluster_is_not_looked_at() -> None:
    """And one whose cluster nobody answers at says so, and starts nothing."""
    task = {"name": "t", "prompts": {"push": True}}
    assert await survey(Config.model_validate({"tasks": [task]})) is None
    command = ["{python}", "{port}"]
    sections = {"tasks": [task], "cluster": {"kind": "ray", "address": "127.0.0.1:9"}}
    found = await survey(Config.model_validate(sections | {"workers": [{"launch": {"command": command}}]}))
    assert found is not None
    assert [problem.path for problem in found.problems] == ["cluster.address"]
    assert found.record["wanted"] == {"CPU": 1.0}
