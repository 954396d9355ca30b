"""Bundles, and words about room, of made-up clusters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.configfile import config_from_mapping
from rollout_svc.launching.cluster.placing import Node, layout_of, why_no_room
from tests.cluster.configs import engine, service

AMOUNTS = st.dictionaries(st.sampled_from(["CPU", "GPU", "own"]), st.integers(1, 4).map(float), min_size=1)


def node(address: str, total: dict[str, float], **free: float) -> Node:
    """A node with that much, of which all is free unless it is said otherwise."""
    return Node(address, total, {**total, **free})


def test_each_engine_has_a_bundle_but_those_in_a_group_of_the_trainers() -> None:
    """In the order of the configuration; engines with urls have none."""
    placement = {"bundles": [1, 0], "tensor_parallel": 2, "group": "trainer"}
    theirs = {"launch": {"command": ["lmdeploy", "{port}"], "placement": placement}}
    own = {"launch": {"command": ["lmdeploy", "{port}"], "placement": {**placement, "owns_group": True}}}
    workers = [engine(), theirs, {"url": "http://127.0.0.1:1"}, own, engine(resources={"GPU": 2})]
    cluster = {"kind": "ray", "strategy": "strict_spread"}
    layout = layout_of(config_from_mapping(service(*workers, cluster=cluster)))
    assert layout.bundles == ({"CPU": 0.5}, {"CPU": 1.0}, {"GPU": 2.0})
    assert (layout.strategy, layout.places) == ("STRICT_SPREAD", {"w0": 0, "w3": 1, "w4": 2})


def test_the_words_say_what_is_wanted_and_what_there_is() -> None:
    """Alike bundles are counted, nodes named with what is free of what they have."""
    nodes = [node("10.0.0.1", {"CPU": 8, "GPU": 1, "memory": 1e9}, CPU=0.5), node("10.0.0.2", {"CPU": 8})]
    assert why_no_room([{"CPU": 1, "GPU": 1}] * 2, "PACK", nodes) == (
        "these nodes never have room: all together have less than CPU 2, GPU 2; wanted: 2 x (CPU 1, GPU 1) by pack; "
        "free: 10.0.0.1 CPU 0.5 of 8, GPU 1 of 1; 10.0.0.2 CPU 8 of 8, GPU 0 of 0"
    )
    assert why_no_room([{"CPU": 8}], "PACK", nodes[:1]).startswith("there is no room for it now; wanted: (CPU 8) ")
    assert "none has own 1;" in why_no_room([{"CPU": 1}, {"own": 1}], "PACK", nodes)
    assert "strict_spread wants 3 nodes, and there are 2;" in why_no_room([{"CPU": 1}] * 3, "STRICT_SPREAD", nodes)
    assert "strict_pack wants CPU 9 on one;" in why_no_room([{"CPU": 3}] * 3, "STRICT_PACK", nodes)
    assert why_no_room([{"CPU": 1}], "PACK", []).endswith("free: no node is alive")
    assert why_no_room([{"own": 1}], "PACK", nodes[1:] * 20).endswith("; 12 more")


@given(bundles=st.lists(AMOUNTS, min_size=1, max_size=4), strategy=st.sampled_from(["PACK", "STRICT_PACK", "SPREAD"]))
def test_never_is_not_said_of_what_one_empty_node_could_hold(bundles: list[dict[str, float]], strategy: str) -> None:
    """One node with the sum of all is room for everything but a strict spread; with less of anything it is not."""
    whole = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU", "own")}
    assert "never" not in why_no_room(bundles, strategy, [node("a", whole, CPU=0, GPU=0, own=0)])
    wanted = next(name for name, amount in whole.items() if amount)
    assert "never" in why_no_room(bundles, strategy, [node("a", whole | {wanted: whole[wanted] - 0.5})])
