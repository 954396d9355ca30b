"""RTensor: a tree of tensors goes out as names and comes back as tensors, each fetched once."""

import json
import pickle
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollout_svc.errors import ShardFailure
from rollout_svc.tensors.rtensor import RTensor, flatten_shard_ids, localize, remotize
from rollout_svc.tensors.shards import FetchBuffer, Fetcher, Node, ShardOwner
from rollout_svc.tensors.tree import DEEPEST


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Batch:
    tokens: Any
    extra: Any = None


@pytest.fixture
def node() -> Iterator[Node]:
    """A process's node, with nothing in it."""
    with Node(ShardOwner(max_bytes=10_000), FetchBuffer()) as node:
        yield node
    assert node.owner is not None
    assert node.owner.handles.live == {}
    assert node.owner.handles.lost == {}


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    """A consumer, as another process has one."""
    fetcher = Fetcher()
    yield fetcher
    fetcher.close()


def test_a_tree_comes_back_as_it_was(node: Node, fetcher: Fetcher) -> None:
    """Containers keep their types, tensors their dtypes, and what is no tensor is left alone."""
    shared = torch.randn(3, 4).bfloat16()
    tree: dict[str, Any] = {
        "list": [np.arange(5), shared, "text"],
        "pair": Pair(torch.tensor(True), (torch.empty(0, 2), None)),
        "batch": Batch(tokens=shared, extra=OrderedDict(a=torch.arange(6).reshape(2, 3).t())),
    }
    remote = remotize(tree, node)
    assert remote["list"][2] == "text"
    assert remote["list"][1] is remote["batch"].tokens
    assert isinstance(tree["list"][1], torch.Tensor)  # the tree that was given is as before

    back = localize(pickle.loads(pickle.dumps(remote)), fetcher)  # noqa: S301 - made in this line
    assert back["list"][1].dtype == torch.bfloat16
    assert torch.equal(back["list"][1], shared)
    assert back["list"][1] is back["batch"].tokens
    assert back["list"][0].tolist() == [0, 1, 2, 3, 4]
    assert isinstance(back["pair"], Pair)
    assert back["pair"].first.item() is True
    assert back["pair"].second[0].shape == (0, 2)
    assert isinstance(back["batch"].extra, OrderedDict)
    assert back["batch"].extra["a"].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("made", [UserDict, MappingProxyType, lambda found: deque(found.values(), 3)])
def test_containers_of_other_types_are_looked_into(
    made: Callable[[dict[str, Any]], Any], node: Node, fetcher: Fetcher
) -> None:
    """P29: a batch that is no dict is stored, fetched and cleared all the same; passed by, it would leak in silence."""
    remote = remotize(made({"a": torch.arange(3), "b": 1}), node)
    assert len(flatten_shard_ids(remote)) == 1
    back = localize(remote, fetcher)
    assert type(back) is type(made({}))
    values = list(back.values() if isinstance(back, Mapping) else back)
    assert (values[0].tolist(), values[1]) == ([0, 1, 2], 1)


def test_a_set_of_remote_tensors_is_looked_into(node: Node, fetcher: Fetcher) -> None:
    """Names may be collected in any container."""
    remote = remotize(torch.arange(3), node)
    assert flatten_shard_ids({remote}) == flatten_shard_ids(frozenset([remote])) == [remote.shard.id]
    [back] = localize({remote}, fetcher)
    assert back.tolist() == [0, 1, 2]


def test_ids_are_flat_and_in_order(node: Node) -> None:
    """What a drain is told: every shard once, in the order of the tree."""
    one, two = torch.zeros(2), np.zeros(3)
    remote = remotize([two, {"x": one}, (two, one), 4], node)
    ids = flatten_shard_ids(remote)
    assert ids == [remote[0].shard.id, remote[1]["x"].shard.id]
    assert flatten_shard_ids([1, "two"]) == []


def test_a_remote_tensor_is_small_and_json(node: Node) -> None:
    """Metadata travels as JSON or pickle; the bytes do not."""
    remote = remotize(torch.zeros(200, 10, dtype=torch.float16), node)
    assert RTensor.from_json(json.loads(json.dumps(remote.as_json()))) == remote
    assert len(pickle.dumps(remote)) < 400
    assert (remote.shape, remote.dtype, remote.nbytes) == ((200, 10), "float16", 4000)
    for wrong in ({"id": "1"}, remote.as_json() | {"library": "jax"}, remote.as_json() | {"library": ["numpy"]}):
        with pytest.raises(ShardFailure, match="no remote tensor"):
            RTensor.from_json(wrong)


def test_a_tree_is_stored_whole_or_not_at_all(node: Node) -> None:
    """What does not fit is refused with the sizes, and what was stored for it goes."""
    with pytest.raises(ShardFailure, match=r"8004 bytes do not fit .* 4000 of 10000 bytes are held in 1 shards"):
        remotize([torch.zeros(1000), torch.zeros(2001)], node)
    assert node.owner is not None
    assert node.owner.stats()[:2] == (0, 0)


def test_arrays_of_objects_and_strings_stay_where_they_are(node: Node, fetcher: Fetcher) -> None:
    """P29: they are no tensors, as trainers keep ids and texts beside those; what holds them goes through."""
    words = [np.array(["a", "bc"]), np.array([b"a"]), np.array([{"x": 1}, None], dtype=object)]
    remote = remotize({"tokens": torch.arange(3), "words": words}, node)
    assert all(one is other for one, other in zip(remote["words"], words, strict=True))
    back = localize(remote, fetcher)
    assert back["tokens"].tolist() == [0, 1, 2]
    assert all(one is other for one, other in zip(back["words"], words, strict=True))


def nested(depth: int) -> Any:
    """Containers within each other, with a tensor in the innermost."""
    tree: Any = torch.arange(3)
    for place in range(depth):
        tree = {"down": tree} if place % 2 else [tree]
    return tree


@pytest.mark.parametrize("made", [dict, list])
def test_a_tree_without_an_end_is_refused(made: Any, node: Node, fetcher: Fetcher) -> None:
    """P35: one that contains itself, or is deeper than any, is named as that, and nothing of it is stored."""
    ring: Any = made()
    inner = [torch.arange(3), ring]
    ring.update(inner=inner) if made is dict else ring.append(inner)
    for tree, told in ((ring, "contains itself"), (nested(DEEPEST + 1), "deeper than 100"), (nested(5000), "deeper")):
        for use in (lambda tree: remotize(tree, node), lambda tree: localize(tree, fetcher), flatten_shard_ids):
            with pytest.raises(ValueError, match=told):
                use(tree)
    assert node.owner is not None
    assert node.owner.stats()[:2] == (0, 0)


def test_a_tree_may_be_deep_and_name_a_container_twice(node: Node, fetcher: Fetcher) -> None:
    """What is there twice, side by side, does not contain itself."""
    twice = [torch.arange(3)]
    for tree in ([twice, twice], nested(DEEPEST)):
        assert len(flatten_shard_ids(remotize(tree, node))) == 1
    one, other = localize(remotize([twice, {"x": twice}], node), fetcher)
    assert one[0] is other["x"][0]


def test_a_missing_shard_fails_alone(node: Node, fetcher: Fetcher) -> None:
    """Its failure stands in its place, or is raised once the others are there."""
    remote = remotize([torch.tensor([1]), torch.tensor([2]), torch.tensor([3])], node)
    node.drop([remote[1].shard.id])
    found = localize(remote, fetcher, on_failure="place")
    assert (found[0].item(), found[2].item()) == (1, 3)
    assert isinstance(found[1], ShardFailure)
    assert (found[1].reason, found[1].ids) == ("missing", (remote[1].shard.id,))
    with pytest.raises(ShardFailure, match="missing: shard"):
        localize(remote, fetcher)
    assert fetcher.buffer.stats().hits == 2


def test_what_is_fetched_stays_until_it_is_drained(node: Node, fetcher: Fetcher) -> None:
    """P29: fetched once, whoever wants it; after the drain it is given out, and not kept."""
    remote = remotize({"a": torch.arange(4)}, node)
    for _ in range(3):
        assert remote["a"].to_local(fetcher).tolist() == [0, 1, 2, 3]
    assert fetcher.buffer.stats()[:6] == (1, 32, 0, 2, 0, 1)
    assert fetcher.buffer.drain(flatten_shard_ids(remote)) == (1, 32)
    assert localize(remote, fetcher)["a"].tolist() == [0, 1, 2, 3]
    assert fetcher.buffer.stats()[:2] == (0, 0)
    assert fetcher.buffer.stats().late == 1


def test_nothing_that_is_done_to_a_tensor_changes_what_is_kept(node: Node, fetcher: Fetcher) -> None:
    """A tensor of torch gets memory of its own when it is written to; an array of NumPy refuses."""
    remote = remotize([torch.arange(4), np.arange(4)], node)
    first, array = localize(remote, fetcher)
    first.add_(7)
    assert localize(remote, fetcher)[0].tolist() == [0, 1, 2, 3]
    assert first.tolist() == [7, 8, 9, 10]
    first.numpy()[0] = 99
    assert localize(remote, fetcher)[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
        array.setflags(write=True)


def test_a_part_does_not_keep_the_whole_alive(node: Node, fetcher: Fetcher) -> None:
    """P27: what the account says is what is kept: a row of a big tensor is a row."""
    rows = torch.arange(2_000_000).reshape(-1, 4)
    columns = np.arange(2_000_000).reshape(-1, 4)
    kept = remotize([rows[3], columns[3]], node)
    rows.zero_()
    columns[:] = 0
    assert [one.tolist() for one in localize(kept, fetcher)] == [[12, 13, 14, 15]] * 2


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_a_name_that_no_host_can_have_is_a_failure_like_any(host: str, node: Node, fetcher: Fetcher) -> None:
    """The encoding of such a name fails before anybody is asked; the others of the tree come."""
    remote = remotize({"here": np.arange(3)}, node)["here"]
    elsewhere = RTensor.from_json({**remote.as_json(), "id": "elsewhere", "owner": f"http://{host}:80"})
    found = localize({"here": remote, "elsewhere": elsewhere}, fetcher, on_failure="place")
    assert found["here"].tolist() == [0, 1, 2]
    assert found["elsewhere"].reason == "unreachable"
