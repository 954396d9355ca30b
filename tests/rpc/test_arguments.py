"""What a caller gives, as a body: the same over HTTP and to an actor; P35."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rollout_svc.errors import BadRequest
from rollout_svc.rpc import arguments, bodies
from rollout_svc.rpc.reading import checked

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
LINE = st.fixed_dictionaries({"text": st.text(max_size=3)})


@given(lines=st.lists(LINE, max_size=3), kind=st.sampled_from([list, tuple, iter]))
def test_any_iterable_of_records_is_a_list(lines: list[dict[str, Any]], kind: Callable[[Any], Any]) -> None:
    """P35: prompts may be given as a list, a tuple, a generator, of any mappings; what is sent is JSON."""
    body = arguments.prompts("sort", kind([MappingProxyType(line) for line in lines]))
    assert orjson.loads(orjson.dumps(body)) == {"task": "sort", "prompts": lines}


@given(step=ANYTHING, groups=ANYTHING, ack=ANYTHING, lines=ANYTHING, source=ANYTHING, force=ANYTHING)
def test_nothing_is_judged_on_the_way(step: Any, groups: Any, ack: Any, lines: Any, source: Any, force: Any) -> None:
    """P35: a mistake reaches the models, and is refused there with its field; nothing raises before."""
    made: list[tuple[dict[str, Any], type[BaseModel]]] = [
        (arguments.batch(step, groups, 1.0, ack), bodies.Batch),
        (arguments.checkpoint(step, groups, ack), bodies.Checkpoint),
        (arguments.prompts(step, lines), bodies.Prompts),
        (arguments.evaluation(step, lines, sampling=source, version=groups, timeout_s=1.0), bodies.Evaluation),
        (arguments.weights(step, source, pause=lines, force=force), bodies.Weights),
        (arguments.given(mode=step, lanes=lines, deadline_s=groups), bodies.Pause),
    ]
    for body, model in made:
        with suppress(BadRequest):
            checked(orjson.loads(orjson.dumps(body)), model)


@pytest.mark.parametrize("ack", ["b1", {"b1": 1}, 7])
def test_one_name_is_no_list_of_letters(ack: Any) -> None:
    """P35: a batch to acknowledge that is given without a list is refused, and not taken apart."""
    assert arguments.batch(1, 2, 3.0, ack)["ack"] == ack
    with pytest.raises(BadRequest):
        checked(arguments.batch(1, 2, 3.0, ack), bodies.Batch)


def test_what_is_not_given_is_not_said() -> None:
    """P35: a body has the keys that were given, so that what is not said is as configured."""
    assert arguments.given(ticket=None, weight_version=0) == {"weight_version": 0}
    assert arguments.batch(1, 2, 3.0, ()) == {"step": 1, "groups": 2, "timeout_s": 3.0}
    assert arguments.checkpoint("/s", 1, iter(["b1"])) == {"path": "/s", "step": 1, "ack": ["b1"]}
    source = MappingProxyType({"kind": "external"})
    assert arguments.weights(3, source, pause=None, force=False) == {"version": 3, "source": {"kind": "external"}}
    assert arguments.weights(3, source, pause={"mode": "wait"}, force=True) == {
        "version": 3,
        "source": {"kind": "external"},
        "pause": {"mode": "wait"},
        "force": True,
    }


def test_a_worker_is_its_keys_or_its_address() -> None:
    """P35: an engine is added by its address, by its keys, or by both; what is said by name holds."""
    assert arguments.worker("http://e", {"max_batch": 2}) == {"url": "http://e", "max_batch": 2}
    assert arguments.worker({"url": "http://e", "max_batch": 1}, {"max_batch": 2}) == {
        "url": "http://e",
        "max_batch": 2,
    }
    assert arguments.worker(None, {"launch": {"command": ["x"]}}) == {"launch": {"command": ["x"]}}


def test_arguments_are_what_the_service_takes() -> None:
    """P35: a body that passed is the service's arguments, whichever way it came; of partial ones what was given."""
    pause = checked({"mode": "wait", "lanes": ["train"]}, bodies.Pause)
    asked = {"mode": "wait", "deadline_s": None, "lanes": ("train",), "if_ticket": None, "kv": "keep", "offload": ()}
    assert pause.arguments() == asked
    source = {"kind": "disk", "path": "/w"}
    weights = checked({"version": 3, "source": source, "pause": {"mode": "wait", "lanes": ["train"]}}, bodies.Weights)
    assert weights.arguments() == {"version": 3, "source": source, "pause": asked, "force": False}
    evaluation = {"task": "sort", "prompts": [{"text": "x"}], "sampling": {"top_k": 1}, "timeout_s": 1.0}
    assert checked(evaluation, bodies.Evaluation).arguments() == evaluation | {"version": None}
    numbers = checked({"trainer": {"max_staleness": 2}}, bodies.Concurrency)
    assert numbers.arguments() == {"trainer": {"max_staleness": 2}, "limits": {}}
