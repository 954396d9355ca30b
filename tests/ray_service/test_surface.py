"""The two ways to call a service have the same names and take the same."""

from __future__ import annotations

import inspect

from rollout_svc.ray.actor import ServiceActor
from rollout_svc.ray.handle import _OWN, CALLS, _Call
from rollout_svc.rpc.client import RolloutClient

ONLY_HTTP = {"close", "take_experts"}
"""A connection that is closed; and tensors that are fetched, where over Ray the batch has them."""
ONLY_RAY = {"stop", "touched"}
BOUNDS = {"timeout_s"}
"""How long a caller waits for an answer: over Ray `ray.get` is told."""


def public(kind: type) -> set[str]:
    """Name the methods of a class."""
    return {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}


def taken(call: object) -> dict[str, object]:
    """Name what a method takes, with the kind and the default of each; what Ray adds to a class it saw is Ray's."""
    parameters = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
    return {one.name: (one.kind, one.default) for one in parameters if one.name not in ("self", "_ray_trace_ctx")}


def test_the_handle_has_every_call_of_the_client() -> None:
    """A trainer that moves to Ray finds every call; the actor has nothing that the handle hides but its own life."""
    assert set(CALLS) == (public(RolloutClient) - ONLY_HTTP) | ONLY_RAY
    assert public(ServiceActor) - set(CALLS) == {"made", "stops_within"}


def test_calls_take_the_same() -> None:
    """P35: the same arguments, in the same order, by the same names, with the same defaults."""
    for name in set(CALLS) - ONLY_RAY:
        own = _OWN.get(name)
        call = getattr(ServiceActor, name) if own is None else own.remote
        assert call is not _Call.remote
        ours, theirs = taken(call), taken(getattr(RolloutClient, name))
        if name == "update_weights":
            theirs = {key: value for key, value in theirs.items() if key not in BOUNDS}
        assert list(ours.items()) == list(theirs.items()), name
