"""The bundles of a placement group that an engine does not own: which are refused, and that their order is kept."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import LaunchConfig, PlacementConfig, WorkerConfig
from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError
from rollout_svc.filtering.threads import AT_ONCE
from rollout_svc.launching import LaunchFailed
from rollout_svc.workers.placement import (
    Bundle,
    PlacementGroup,
    bundles_of,
    environment,
    group_named,
    ignored,
    problems,
)
from rollout_svc.workers.placement_groups import RayGroups

VARIABLE = "LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES"
ADDRESSES = ["127.0.0.9", "127.0.0.2", "127.0.0.10", "127.0.0.4"]
ENTRY = {
    "name": "trainer",
    "state": "CREATED",
    "bundles": {2: {"CPU": 1.0}, 0: {"GPU": 1.0, "CPU": 2.0}, 1: {"GPU": 0.5}},
    "bundles_to_node_id": {0: "n0", 1: "n1", 2: "n0"},
}
"""As Ray has it: by index, not in order."""
NODES = {"n0": "127.0.0.9", "n1": "127.0.0.2"}


def placement(*bundles: int, tensor_parallel: int = 1, **more: Any) -> PlacementConfig:
    return PlacementConfig(bundles=bundles, tensor_parallel=tensor_parallel, **({"group": "trainer"} | more))


def unchecked(*bundles: int, tensor_parallel: int = 1, device: str = "GPU") -> PlacementConfig:
    """A list as it comes, with what reading would refuse."""
    return PlacementConfig.model_construct(
        bundles=bundles, tensor_parallel=tensor_parallel, device=device, group="trainer", owns_group=False
    )


def group(*devices: float) -> PlacementGroup:
    """A group with so much of the device in each bundle, on machines whose addresses sort some other way."""
    places = [Bundle({"CPU": 1.0, "GPU": held}, ADDRESSES[n % 4]) for n, held in enumerate(devices)]
    return PlacementGroup("trainer", tuple(places))


class Groups:
    """Has one group, and counts who asks."""

    def __init__(self, *devices: float) -> None:
        self.group, self.asked = group(*devices), 0

    async def find(self, name: str) -> PlacementGroup:
        self.asked += 1
        assert name == self.group.name
        return self.group


@given(st.data())
def test_the_order_given_is_the_order_kept(data: st.DataObject) -> None:
    """Whatever the addresses, and whichever order: the engine reads the list as the trainer wrote it."""
    count = data.draw(st.integers(1, 24))
    order = data.draw(st.permutations(range(count)))
    bundles = order[: data.draw(st.integers(1, count))]
    config = placement(*bundles, tensor_parallel=data.draw(st.integers(1, len(bundles))))
    said = bundles_of(config, group(*[1.0] * count))
    assert [int(index) for index in said.split(",")] == bundles


@given(
    st.lists(st.integers(-2, 7), max_size=8), st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=6), st.integers(1, 6)
)
def test_a_list_is_used_exactly_where_nothing_is_wrong(
    bundles: list[int], devices: list[float], tensor_parallel: int
) -> None:
    """Every index in range, once, with the device, and enough of them; else each wrong one is named at its place."""
    wrong = {
        f"placement.bundles.{place}"
        for place, index in enumerate(bundles)
        if not 0 <= index < len(devices) or devices[index] == 0 or index in bundles[:place]
    }
    few = len(bundles) - len(wrong) < tensor_parallel
    found = problems(unchecked(*bundles, tensor_parallel=tensor_parallel), group(*devices))
    assert {problem.path for problem in found} == wrong | ({"placement.bundles"} if few else set())
    assert len(found) == len(wrong) + few


def test_everything_wrong_with_a_list_is_one_error() -> None:
    """The error has the list, and each of its problems with what is there instead."""
    with pytest.raises(LaunchFailed) as raised:
        bundles_of(unchecked(3, 9, 0, 3, 1, tensor_parallel=4), group(1, 0, 1, 1))
    listed, _, said = str(raised.value).partition(": ")
    assert listed == "bundles [3, 9, 0, 3, 1] of placement group 'trainer'"
    assert said.split("; ") == [
        "placement.bundles.1: 9 is no bundle of the group: it has 4, counted from 0",
        "placement.bundles.3: bundle 3 is already bundles.0",
        "placement.bundles.4: bundle 1 holds no GPU, but CPU 1 on 127.0.0.2",
        "placement.bundles: 2 of the bundles can be used, and tensor_parallel is 4",
    ]


def test_another_device_has_another_name() -> None:
    """A bundle holds what the setting calls the device, not what another machine would."""
    [lacking, few] = problems(placement(0, device="NPU"), group(1))
    assert lacking.message == "bundle 0 holds no NPU, but CPU 1, GPU 1 on 127.0.0.9"
    assert few.path == "placement.bundles"


async def test_an_engine_that_owns_its_group_gets_no_list() -> None:
    """Nothing is looked up nor passed on, not even a list that would be refused, and a remark says so."""
    groups = Groups(1, 1)
    owning = PlacementConfig(bundles=(5, 5), tensor_parallel=4, owns_group=True)
    assert await environment(owning, groups) == {VARIABLE: ""}
    assert await environment(None, groups) == {}
    assert groups.asked == 0
    words = "ignored: the engine owns its placement group (owns_group), so the bundles [5, 5] are not passed on"
    assert ignored(owning) == words
    assert ignored(placement(0)) is ignored(None) is None


async def test_a_group_is_looked_at_before_each_start() -> None:
    """The group that has the name now is the one that counts."""
    groups, config = Groups(1, 1, 1, 1), placement(3, 1, 2, tensor_parallel=3)
    assert await environment(config, groups) == {VARIABLE: "3,1,2"}
    groups.group = group(1, 1)
    with pytest.raises(LaunchFailed, match=r"bundles\.0: 3 is no bundle .*bundles\.2: 2 is no bundle"):
        await environment(config, groups)


def test_a_group_is_found_by_name_or_by_id() -> None:
    """Its bundles are in the order of their indices, each with the address of its node."""
    table = {"ab12": ENTRY, "cd34": ENTRY | {"name": "other"}, "ef56": ENTRY | {"state": "REMOVED"}}
    for name in ("trainer", "ab12"):
        found = group_named(name, table, NODES)
        assert found.name == name
        assert [bundle.resources for bundle in found.bundles] == [{"GPU": 1, "CPU": 2}, {"GPU": 0.5}, {"CPU": 1}]
        assert [bundle.address for bundle in found.bundles] == ["127.0.0.9", "127.0.0.2", "127.0.0.9"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({}, "there is no placement group 'trainer', but none at all"),
        ({"a": ENTRY | {"name": "b"}, "c": ENTRY | {"name": ""}}, "no placement group 'trainer', but 'b', 'c'"),
        ({"a": ENTRY | {"state": "REMOVED"}}, "there is no placement group 'trainer', but none at all"),
        ({"a": ENTRY, "b": ENTRY}, "several are called 'trainer'; give one of the ids a, b"),
        ({"a": ENTRY | {"state": "PENDING"}}, "'trainer' is not ready: Ray says PENDING"),
    ],
)
def test_a_group_that_cannot_be_used_is_named(table: dict[str, Any], said: str) -> None:
    """There is none of that name, there are several, or it is not ready: said with what there is."""
    with pytest.raises(LaunchFailed, match=f"^placement.group: .*{said}$"):
        group_named("trainer", table, NODES)


def refused(**worker: Any) -> dict[str, str]:
    """The problems of a configuration with one launched engine, by path."""
    placed = {"group": "g", "bundles": [1, 0], "tensor_parallel": 2} | worker.pop("placement", {})
    launch = {"command": ["e", "{port}"], "placement": placed} | worker.pop("launch", {})
    tasks = [{"name": "a", "prompts": {"push": True}}]
    with pytest.raises(ConfigError) as raised:
        config_from_mapping({"tasks": tasks, "workers": [{"launch": launch} | worker]})
    return {problem.path.removeprefix("workers.0."): problem.message for problem in raised.value.problems}


def test_what_is_wrong_without_a_group_is_refused_at_reading() -> None:
    """P35: each problem at its dotted path, all of one list at once, and nothing asks Ray."""
    assert refused(placement={"bundles": [2, 0, 2], "tensor_parallel": 3, "group": None}) == {
        "launch.placement.bundles.2": "bundle 2 is already bundles.0",
        "launch.placement.bundles": "2 different bundles for 3 workers (tensor_parallel)",
        "launch.placement.group": "name the placement group that the bundles are of (or say owns_group: true)",
    }
    assert refused(placement={"bundles": [1, 1, -1], "tensor_parallel": 2}) == {
        "launch.placement.bundles.1": "bundle 1 is already bundles.0",
        "launch.placement.bundles.2": "bundles are counted from 0, there is no -1",
        "launch.placement.bundles": "1 different bundles for 2 workers (tensor_parallel)",
    }
    assert list(refused(placement={"bundles": [0, True]})) == ["launch.placement.bundles.1"]
    assert list(refused(placement={"bundles": "0,1"})) == ["launch.placement.bundles"]
    assert list(refused(placement={"tensor_parallel": 0})) == ["launch.placement.tensor_parallel"]
    assert list(refused(placement={"bundle": [0]})) == ["launch.placement.bundle"]
    assert refused(launch={"env": {VARIABLE: "1,0"}}) == {
        f"launch.env.{VARIABLE}": "is made from placement.bundles: leave one of the two out"
    }
    assert refused(dialect="vllm") == {
        "launch.placement": "only LMDeploy reads it, and the dialect is 'vllm'",
    }


def test_the_settings_keep_the_order() -> None:
    """What is written can be read again, in the same order."""
    launch = LaunchConfig(command=("e", "{port}"), placement=placement(3, 1, 2, tensor_parallel=3))
    config = WorkerConfig(launch=launch, dialect="lmdeploy")
    assert WorkerConfig.model_validate_json(config.model_dump_json()) == config
    assert config.model_dump()["launch"]["placement"] == {
        "bundles": (3, 1, 2),
        "tensor_parallel": 3,
        "group": "trainer",
        "device": "GPU",
        "owns_group": False,
    }


class Silent(RayGroups):
    """A cluster that takes the connection, and says nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__("auto", timeout_s=0.05)
        self.over = threading.Event()

    def _ask(self) -> tuple[dict[str, Any], dict[str, str]]:
        self.over.wait(20)
        return {}, {}


async def test_a_cluster_that_does_not_answer_is_named_in_time() -> None:
    """The wait is bounded; with every thread waiting, who asks then is told at once."""
    groups = Silent()
    try:
        asking = await asyncio.gather(*(groups.find("trainer") for _ in range(AT_ONCE)), return_exceptions=True)
        said = {str(failure) for failure in asking if isinstance(failure, LaunchFailed)}
        assert said == {"placement.group: Ray at auto did not answer within 0.05 s"}
        with pytest.raises(LaunchFailed, match=f"Ray at auto does not answer: {AT_ONCE} earlier calls"):
            await groups.find("trainer")
    finally:
        groups.over.set()
