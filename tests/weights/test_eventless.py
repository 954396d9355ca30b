"""Engines that cannot open the event of a buffer: the update goes on without, and every bit of it arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from rollout_svc.embedded.receiving import EventError, Receiver
from rollout_svc.errors import NotNow
from rollout_svc.weights.publisher import WeightPublisher
from rollout_svc.weights.senders.protocol import Engine, Reissuing
from rollout_svc.weights.senders.shared_memory import SharedMemorySender
from tests.embedded.helpers import Served, served, small_model
from tests.support.stage import stage
from tests.weights.test_publish import same, weights
from tests.weights.test_publish_policies import url
from tests.weights.test_publisher import ENGINES, Asking, publisher_and_service, tensors

FIRST, SECOND = (small_model(seed=seed).state_dict() for seed in (1, 2))


class Watched(Receiver):
    """Notes what each call carried.

    Attributes:
        carried: of `buffer` and `event`, and whether it was to be copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[tuple[bool, bool, bool]] = []

    def receive(self, call: Mapping[str, Any], load: Callable[[list[tuple[str, torch.Tensor]]], object]) -> int:
        self.carried.append(("buffer" in call, "event" in call, bool(call["require_clone"])))
        return super().receive(call, load)


class Eventless(Watched):
    """Cannot open events from the one on that is told, counted from 0."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._good = first

    def _buffer_of(self, call: Mapping[str, Any]) -> Any:
        if "event" in call:
            if self._good == 0:
                raise EventError("event: there are none on this platform")
            self._good -= 1
        return super()._buffer_of(call)


def watch(engine: Served, receiver: Watched) -> Watched:
    """Have the engine receive so."""
    engine.engine._updating._receiver = receiver
    return receiver


ONCE, LATER, WHOLE = (True, True, False), (False, False, False), (True, False, True)


async def test_the_update_goes_on_without_the_event_where_one_engine_cannot_open_it() -> None:
    """P26: in the same update, bit for bit at both; said once, with the engine's name; the next begins without."""
    async with served(is_open=True) as one, served(is_open=True) as other:
        can, cannot = watch(one, Watched()), watch(other, Eventless())
        async with (
            stage(url(one), url(other)) as made,
            WeightPublisher(made.service, bucket_bytes=2**14) as publisher,
        ):
            with capture_logs() as logs:
                for version, wanted in enumerate((FIRST, SECOND), 1):
                    record = await publisher.publish(wanted, version, pause={})
                    assert record["workers"] == {name: {"ok": True, "version": version} for name in ("w0", "w1")}
                    assert same(weights(one), wanted)
                    assert same(weights(other), wanted)
    buckets = len(can.carried) // 2
    assert buckets > 2
    assert can.carried == [ONCE] + [WHOLE] * (2 * buckets - 1), "who has a bucket is not given it again"
    assert cannot.carried == [ONCE] + [WHOLE] * 2 * buckets
    said = [line for line in logs if line["event"] == "weights.cloned"]
    assert [(line["log_level"], line["why"]) for line in said] == [("warning", publisher._sender.cloned)]  # type: ignore[attr-defined]
    assert said[0]["why"].startswith("w1: Failed to update model weights: event: there are none")


async def test_an_event_that_cannot_be_opened_in_the_middle() -> None:
    """P26: of a buffer that replaced another: what came before stays, what follows comes without."""
    wanted = dict(sorted(FIRST.items(), key=lambda pair: pair[1].nbytes))
    async with served(is_open=True) as engine:
        receiver = watch(engine, Eventless(1))
        async with stage(url(engine)) as made, WeightPublisher(made.service, bucket_bytes=2**10) as publisher:
            await publisher.publish(wanted, 1, pause={})
            assert same(weights(engine), wanted)
    at = receiver.carried.index(ONCE, 1)
    assert LATER in receiver.carried[:at]
    assert set(receiver.carried[at + 1 :]) == {WHOLE}


async def test_one_that_cannot_do_without_either_ends_the_update() -> None:
    """P24: asked once more, and no oftener; the engine has what it had."""

    class Never(Watched):
        def _buffer_of(self, call: Mapping[str, Any]) -> Any:
            raise EventError(f"event: {call.get('event')}")

    async with served(is_open=True) as engine:
        receiver, had = watch(engine, Never()), weights(engine)
        async with stage(url(engine)) as made, WeightPublisher(made.service) as publisher:
            with pytest.raises(NotNow) as raised:
                await publisher.publish(FIRST, 1, pause={})
            assert "event: None" in str(raised.value.detail)
            assert receiver.carried == [ONCE, WHOLE]
            assert same(weights(engine), had)


async def test_the_same_bucket_without_its_event_is_the_same_bucket() -> None:
    """P24 P26: asked for it twice it is given once; all that follow come so, and no bucket is skipped."""

    async def without(ask: Asking) -> None:
        await ask("/begin", engines=ENGINES)
        status, refused = await ask("/next", bucket=0, events=False)  # it has not been given yet
        assert "event" in refused["bodies"]["w0"]
        answers = [(await ask("/next", bucket=0, events=False, why="w0: no"))[1] for _ in range(2)]
        assert answers[0] == answers[1]
        body, before = answers[0]["bodies"]["w0"], refused["bodies"]["w0"]
        assert (body["metadata"], body["buffer"], body["written"]) == tuple(
            before[key] for key in ("metadata", "buffer", "written")
        )
        assert (body["require_clone"], "event" in body, status) == (True, False, 200)
        later = (await ask("/next", bucket=1))[1]["bodies"]["w0"]
        assert (later["metadata"][0]["name"], later["require_clone"], "buffer" in later) == ("t1", True, True)
        assert (await ask("/next", bucket=1, events=False))[0] == 400, "it had none"

    async with publisher_and_service() as (publisher, service):
        await service.told.put(without)
        await publisher.publish(tensors(), 1)


@pytest.mark.parametrize("end", ["opened", "closed", "released"])
def test_a_sender_without_a_bucket_has_none_to_give_again(end: str) -> None:
    """P24: before the first, after the last, and once its buffer was given up."""
    sender = SharedMemorySender(64)
    assert isinstance(sender, Reissuing)
    sender.open([Engine("w0", "sglang", 1)])
    if end != "opened":
        sender.write([("a", torch.ones(4))])
        sender.close(whole=False)
    if end != "closed":
        sender.release()
    with pytest.raises(ValueError, match="no bucket with an event"):
        sender.without_event("w0: no")
    sender.release()
    assert sender.cloned is None
