"""When bundles fit: one rule for whoever looks before a start and whoever waits for room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.launching.cluster.placing import Layout, Node, why_no_room
from rollout_svc.launching.cluster.room import lacks
from rollout_svc.launching.cluster.survey import lacking

AMOUNTS = st.dictionaries(
    st.sampled_from(["CPU", "GPU"]), st.integers(1, 40).map(lambda tenths: tenths / 10), min_size=1
)
BUNDLES = st.lists(AMOUNTS, min_size=1, max_size=5)
STRATEGIES = st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])


def test_a_node_is_full_to_the_last_tenth() -> None:
    """Three bundles of 0.1 fit where there is 0.3, whatever a sum of fractions says; of more they do not."""
    room = why_no_room([{"CPU": 0.1}] * 3, "STRICT_PACK", [Node("a", {"CPU": 0.3}, {})])
    assert room.startswith("there is no room for it now; ")
    assert [lack.kind for lack in lacks([{"CPU": 0.1}] * 3, "PACK", [{"CPU": 0.2999}])] == ["together"]


@given(BUNDLES, STRATEGIES, BUNDLES)
def test_a_look_before_the_start_and_a_wait_for_room_agree(
    bundles: list[dict[str, float]], strategy: str, nodes: list[dict[str, float]]
) -> None:
    """What one calls a problem the other says is never to be had, and of everything else neither does."""
    layout = Layout(tuple(bundles), strategy, {f"w{index}": index for index in range(len(bundles))})
    waits = why_no_room(bundles, strategy, [Node("a", node, {}) for node in nodes])
    assert bool(lacking(nodes, layout)) == ("never" in waits)
