"""Trees of tensors: what is changed of them is a copy."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest

from rollout_svc.tensors.tree import mapped


class Batch(MutableMapping[str, Any]):
    """A mapping by hand, as batches of trainers are, that knows something more."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_ = dict(items)
        self.step = 7

    def __getitem__(self, key: str) -> Any:
        """Get one."""
        return self.items_[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Set one."""
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        """Delete one."""
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        """Their keys."""
        return iter(self.items_)

    def __len__(self) -> int:
        """How many."""
        return len(self.items_)


@pytest.mark.parametrize("made", [dict, UserDict, Batch])
def test_the_tree_that_was_given_stays_as_it_is(made: Callable[[dict[str, Any]], Any]) -> None:
    """P27: whoever stores the tensors of a batch still has his batch, whatever type it is of."""
    tree = made({"a": 1, "b": made({"c": 2})})
    changed = mapped(tree, lambda _: False, lambda leaf: leaf + 10)
    assert (tree["a"], tree["b"]["c"]) == (1, 2)
    assert (changed["a"], changed["b"]["c"]) == (11, 12)
    assert type(changed) is type(tree)
    assert getattr(changed, "step", None) == getattr(tree, "step", None)


def test_nothing_of_a_change_outlives_it() -> None:
    """P29: what the change had, tensors among it, goes with the call, without waiting for the collector."""
    gc.disable()
    try:
        held = Batch({})
        seen = weakref.ref(held)

        def change(leaf: Any, held: Batch = held) -> Any:
            return leaf + held.step

        assert mapped({"a": [1, 2]}, lambda _: False, change) == {"a": [8, 9]}
        del change, held
        assert seen() is None
    finally:
        gc.enable()
