"""Trees of tensors: mappings, lists, deques, tuples, named tuples, sets and dataclasses, and what hangs on them.

Mappings of any type: batches of trainers are often no dict (`UserDict`, as a tokenizer's answer is). What is passed by
as a leaf is neither stored, nor fetched, nor cleared at the step's end.

Invariants:

- Pure: the tree that is given is not changed; its containers are made anew, of the same types.
- Leaves are visited in the order of the tree; what is no container is a leaf, an array of objects too.
- What has no end is refused: a tree that contains itself, and one that is deeper than any that means something.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["DEEPEST", "leaves", "mapped"]

DEEPEST: Final = 100
"""Containers within each other; each takes a few of the thousand calls that Python lets wait for one another."""


def leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the leaves of a tree.

    Args:
        tree: of containers.
        is_leaf: says so of what would otherwise be a container.

    Raises:
        ValueError: it contains itself, or is deeper than `DEEPEST`.
    """
    return _leaves(tree, is_leaf, [])


def _leaves(tree: Any, is_leaf: Callable[[Any], bool], path: list[Any]) -> Iterator[Any]:
    children = None if is_leaf(tree) else _children(tree)
    if children is None:
        yield tree
    else:
        with _within(tree, path):
            for child in children:
                yield from _leaves(child, is_leaf, path)


def mapped(tree: Any, is_leaf: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Return a tree with every leaf replaced. Arguments and errors as `leaves`."""
    return _mapped(tree, is_leaf, change, [])


def _mapped(tree: Any, is_leaf: Callable[[Any], bool], change: Callable[[Any], Any], path: list[Any]) -> Any:
    # No closure that knows itself: such a circle keeps `change`, and the tensors it has, until the collector comes by.
    if is_leaf(tree) or not _is_container(tree):
        return change(tree)
    with _within(tree, path):
        return _made_anew(tree, lambda child: _mapped(child, is_leaf, change, path))


@contextmanager
def _within(tree: Any, path: list[Any]) -> Iterator[None]:
    """Go into a container, the one below the last of `path`, for as long as the body lasts."""
    if any(tree is above for above in path):
        raise ValueError(f"a tree that contains itself: {type(tree).__name__} at depth {len(path)}")
    if len(path) >= DEEPEST:
        raise ValueError(f"a tree that is deeper than {DEEPEST} containers")
    path.append(tree)
    try:
        yield
    finally:
        path.pop()


def _made_anew(tree: Any, inner: Callable[[Any], Any]) -> Any:
    """Return a container like this one, with `inner` of what it holds."""
    if isinstance(tree, MutableMapping):
        changed = _copied(tree)
        for key, child in list(tree.items()):
            changed[key] = inner(child)
        return changed
    if isinstance(tree, Mapping):
        found = {key: inner(child) for key, child in tree.items()}
        made_of: Any = type(tree)
        return tree if all(found[key] is child for key, child in tree.items()) else made_of(found)
    if isinstance(tree, tuple):
        values = [inner(child) for child in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    if isinstance(tree, list):
        made = copy.copy(tree)
        made[:] = [inner(child) for child in tree]
        return made
    if isinstance(tree, deque):
        return deque((inner(child) for child in tree), tree.maxlen)
    if isinstance(tree, set | frozenset):
        return type(tree)(inner(child) for child in tree)
    made = copy.copy(tree)
    for field in dataclasses.fields(tree):
        if hasattr(tree, field.name):
            object.__setattr__(made, field.name, inner(getattr(tree, field.name)))  # frozen ones as well
    return made


def _copied(tree: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Copy a mapping: of its own type, with whatever else it knows, and with items of its own.

    A copy of one that keeps its items in another has that one in common with it: what is put into the copy would be in
    the caller's own batch.
    """
    made = copy.copy(tree)
    if not isinstance(tree, dict) and hasattr(tree, "__dict__"):
        for name, kept in vars(tree).items():
            if isinstance(kept, MutableMapping) and vars(made).get(name) is kept:
                object.__setattr__(made, name, copy.copy(kept))
    return made


def _children(tree: Any) -> list[Any] | None:
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, list | tuple | deque | set | frozenset):
        return list(tree)
    if _is_dataclass(tree):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
    return None


def _is_container(tree: Any) -> bool:
    return isinstance(tree, Mapping | list | tuple | deque | set | frozenset) or _is_dataclass(tree)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
