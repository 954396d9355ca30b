"""Rounds of updates to LMDeploy: its silent stale load is never provoked, whatever it opens and whatever fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads.lmdeploy import LMDeployRound, body, finish, payload
from rollout_svc.weights.persistent import Parts
from tests.support.engine_pickles import LMDEPLOY_CLASS, loads
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.lmdeploy_client import LMDeployClient
from tests.support.lmdeploy_weights import Rank
from tests.weights.test_payloads import deliver

ONCE = {"metadata", "require_clone", "flattened_tensor", "event_ipc_handle"}
PATH = "/update_weights"
LATER = {"metadata", "require_clone"}


class Shared:
    """An event of this process, and whoever opens it: both write to one log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.opened = 0

    def ipc_handle(self) -> bytes:
        return b"event"

    def record(self) -> None:
        self.log.append("sender records")

    def wait(self) -> None:
        self.log.append("sender waits")

    def open(self, handle: bytes) -> Opened:
        assert handle == b"event"
        self.opened += 1
        return Opened(self)


class Opened:
    """The event as the engine has it."""

    def __init__(self, shared: Shared) -> None:
        self._log = shared.log

    def record(self) -> None:
        self._log.append("engine records")

    def wait(self) -> None:
        self._log.append("engine waits")


def sent(payloads: list[str]) -> dict[str, object]:
    """What a call carries."""
    [only] = payloads
    found: dict[str, object] = loads(only, LMDEPLOY_CLASS)
    return found


def full(value: float, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    """One tensor of one value."""
    return [("w", torch.full((4,), value, dtype=dtype))]


def loaded(rank: Rank) -> float:
    """What the engine has of it."""
    [value] = set(rank.weights["w"].tolist())
    return float(value)


steps = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "finish", "lost before", "lost after", "sleep"]),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.integers(1, 9),
    ),
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(steps, st.booleans())
def test_nothing_stale_is_ever_loaded(drawn: list[tuple[str, torch.dtype, int]], opens: bool) -> None:
    """P26: over rounds, failures, sleeps, dtypes and growing buckets, each answered call loaded what it was given."""
    shared = Shared()
    rank = Rank(shared.open if opens else None)
    send = LMDeployRound(event=shared if opens else None)
    for value, (what, dtype, size) in enumerate(drawn):
        if what == "sleep":
            rank.drop()
            send.ended()
        elif what == "finish":
            deliver(finish(1), [rank])
            send.ended()
        else:
            wanted = torch.full((size,), value + 1, dtype=dtype)
            payloads = send.bucket([("w", wanted)])
            if what == "lost before":
                send.ended()
                continue
            deliver(body(payloads), [rank])
            assert rank.weights["w"].dtype is dtype
            assert torch.equal(rank.weights["w"], wanted)
            if what == "lost after":
                rank.drop()
                send.ended()
            else:
                send.answered()


async def test_a_buffer_left_out_after_a_clone_is_loaded_stale_and_never_sent() -> None:
    """P26: the engine answers 200 to a call that loads old bytes; ours carries the buffer each time."""
    async with FakeLMDeploy() as engine, LMDeployClient(engine) as client:
        [rank] = engine.ranks
        careless = FlattenedBucket.pack(full(1), "elements")
        for value, parts in ((1.0, Parts(True, False, True, True)), (2.0, Parts(False, False, False, False))):
            careless.buffer.fill_(value)
            assert await client.post(PATH, body([payload(careless, parts)])) == (200, None)
        assert loaded(rank) == 1.0  # what was sent is 2.0
        send = LMDeployRound()
        for value in (3.0, 4.0):
            payloads = send.bucket(full(value))
            assert sent(payloads).keys() == {"metadata", "require_clone", "flattened_tensor"}
            assert await client.post(PATH, body(payloads)) == (200, None)
            send.answered()
            assert loaded(rank) == value


def test_an_event_the_engine_cannot_open_is_loaded_stale_so_none_is_sent_unasked() -> None:
    """P26: told of an event where none opens, the engine clones in silence; without one nothing depends on it."""
    send, rank = LMDeployRound(event=Shared()), Rank()
    for value in (1.0, 2.0):
        deliver(body(send.bucket(full(value))), [rank])
        send.answered()
    assert loaded(rank) == 1.0
    assert "event_ipc_handle" not in sent(LMDeployRound().bucket(full(1)))


def test_the_buffer_and_its_event_travel_once_a_round() -> None:
    """P26: first call of a round, after that metadata alone, until a dtype, a buffer, a failure or the end."""
    send = LMDeployRound(event=Shared())
    for carried in (ONCE, LATER):
        call = sent(send.bucket(full(1)))
        assert call.keys() == carried
        assert call["require_clone"] is False
        send.answered()
    assert sent(send.bucket(full(1, torch.bfloat16))).keys() == ONCE
    send.answered()
    assert sent(send.bucket(full(1))).keys() == ONCE
    send.answered()
    assert sent(send.bucket([("w", torch.ones(5))])).keys() == ONCE
    send.ended()
    assert sent(send.bucket(full(1))).keys() == ONCE
    send.answered()
    assert sent(send.bucket(full(1))).keys() == LATER
    send.ended()
    assert sent(send.bucket(full(1))).keys() == ONCE


def test_a_bucket_that_was_refused_under_an_event_is_loaded_without() -> None:
    """P26: over whatever the engine kept of the first try; no event is sent any more, nor waited for."""
    shared = Shared()

    def failing(handle: bytes) -> Opened:
        shared.open(handle)
        raise OSError("no events on this platform")

    send, rank = LMDeployRound(event=shared), Rank(failing)
    with pytest.raises(OSError, match="no events"):
        deliver(body(send.bucket(full(1))), [rank])
    log = list(shared.log)
    again = send.without_event()
    assert sent(again).keys() == LATER | {"flattened_tensor"}
    assert sent(again)["require_clone"] is True
    deliver(body(again), [rank])
    send.answered()
    assert loaded(rank) == 1.0
    deliver(body(send.bucket(full(2))), [rank])
    with pytest.raises(ValueError, match="no bucket with an event"):
        send.without_event()
    send.answered()
    with pytest.raises(ValueError, match="no bucket with an event"):
        send.without_event()
    assert (loaded(rank), shared.log) == (2.0, log)


def test_writing_and_reading_take_turns() -> None:
    """P26: the sender waits for the reading before it writes, and the engine for the writing before it reads."""
    shared = Shared()
    send, rank = LMDeployRound(event=shared), Rank(shared.open)
    for value in (1, 2):
        deliver(body(send.bucket(full(value))), [rank])
        send.answered()
    turn = ["sender waits", "sender records", "engine waits", "engine records"]
    assert shared.log == turn * 2
    assert shared.opened == 1


def test_a_bucket_is_not_overwritten_before_its_answer() -> None:
    """P26: the next bucket is refused while the last one may still be read."""
    send = LMDeployRound()
    send.bucket(full(1))
    with pytest.raises(RuntimeError, match="not answered yet"):
        send.bucket(full(2))


def test_an_empty_bucket_says_that_nothing_follows() -> None:
    """P26: it is sent with `finished` and with nothing else; the engine drops what it kept."""
    shared = Shared()
    send, rank = LMDeployRound(event=shared), Rank(shared.open)
    deliver(body(send.bucket(full(1))), [rank])
    send.answered()
    last = finish(1)
    assert sent([last["serialized_named_tensors"]]) == {"metadata": []}
    assert last["finished"] is True
    deliver(last, [rank])
    send.ended()
    bucket = FlattenedBucket.pack(full(1), "elements")
    with pytest.raises(ValueError, match="flattened_tensor is not provided"):
        rank.update(payload(bucket, Parts(False, False, False, False)), finished=False)
    assert loaded(rank) == 1.0


def test_an_event_is_for_one_receiver() -> None:
    """P26: it would know the last reading of several, and the buffer be overwritten under the others."""
    with pytest.raises(ValueError, match="one receiver of an event, not 2"):
        LMDeployRound(receivers=2, event=Shared())
