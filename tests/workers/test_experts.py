"""The desk that makes handles of routed experts: whole or not at all, and nothing left of what nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import ExpertsConfig, SamplingConfig
from rollout_svc.engines import Completion, Endpoint, GenerateRequest, SGLangDialect
from rollout_svc.errors import Interrupted, RolloutError, SampleFailure
from rollout_svc.events import CapabilityWithdrawn, EventBus
from rollout_svc.ledger import Ledger
from rollout_svc.segment import FinishReason, Segment
from rollout_svc.tasks import TaskOwner
from rollout_svc.tensors import Handle, Handles, MemoryStore
from rollout_svc.tensors.experts import RawExperts
from rollout_svc.workers.breaker import Breaker
from rollout_svc.workers.experts import ExpertsDesk
from rollout_svc.workers.worker import Worker
from tests.support.groups import make_sample
from tests.support.routing import TINY
from tests.support.threads import HandThreads
from tests.support.virtual import soon, virtual

PROMPT = [1, 2, 3]  # of `make_sample`
MADE = [40, 41, 42, 43]


def worker() -> Worker:
    """An engine that nobody has asked anything."""
    return Worker(
        worker_id="w0",
        endpoint=Endpoint("http://127.0.0.1:9", None, None),
        candidates=(SGLangDialect(),),
        max_batch=1,
        exclusive=True,
        stream=False,
        breaker=Breaker(Random(0)),
        on_change=lambda *_: None,
    )


def answer(ids: list[int], finish: FinishReason = "stop") -> Completion:
    """A completion of these tokens."""
    return Completion(list(ids), [-1.0] * len(ids), finish, finish, ())


class FullStore(MemoryStore):
    """Has no room."""

    def put(self, tensor: np.ndarray[Any, Any]) -> Any:
        raise OSError("no room")


class Room:
    """A desk, a sample that generates, and what the engine sends for it."""

    def __init__(self, *, at_once: bool = True, store: MemoryStore | None = None) -> None:
        self.handles = Handles(debug=True)
        self.threads = HandThreads(at_once=at_once)
        self.bus = EventBus()
        self.withdrawn: list[CapabilityWithdrawn] = []
        self.bus.subscribe(CapabilityWithdrawn, self.withdrawn.append)
        self.tasks = TaskOwner()
        config = ExpertsConfig(enabled=True, num_experts=8, top_k=2, layers=4, moe_layers=(1, 2, 3))
        self.desk = ExpertsDesk(config, self.handles, store or MemoryStore(), self.threads, self.tasks, self.bus)
        self.worker = worker()
        self.sample = make_sample(Ledger())
        self.attempt = self.sample.hand_out()
        self.fetched: list[str] = []
        self.keys: dict[str, Any] = {}
        self.desk.fetch = self._fetch

    async def _fetch(self, key: str) -> Any:
        self.fetched.append(key)
        await asyncio.sleep(1.0)
        if key not in self.keys:
            raise SampleFailure("experts_missing", "nothing there")
        return self.keys.pop(key)

    @property
    def live(self) -> int:
        """Handles that are alive."""
        return sum(tally.handles for tally in self.handles.live.values())

    def held(self) -> int:
        """Rows the next call asks from."""
        rows = self.desk.rows_held(self.sample, "train", asked=True)
        assert rows is not None
        return rows

    def raw(self, tokens: list[int], start: int) -> RawExperts:
        """What an engine sends for these tokens."""
        rows = TINY.hidden(tokens, 0)[start:].astype("<i4")
        return RawExperts("int32", rows.tobytes(), start)

    async def read(
        self,
        completion: Completion,
        raw: RawExperts | None,
        read: Callable[[], Completion] | None = None,
        max_tokens: int = 100,
    ) -> Completion:
        """Have an answer to a call for what comes after the sample's tokens read."""
        sent = len(PROMPT) + self.sample.response_length
        request = GenerateRequest("r", [], max_tokens, SamplingConfig(), None, experts_from=self.held())
        return await self.desk.read(self.worker, self.sample, request, sent, raw, read or (lambda: completion))

    async def turn(self, ids: list[int]) -> None:
        """Have the sample go on by these tokens."""
        tokens = PROMPT + self.sample.response_ids + ids
        completion = await self.read(answer(ids), self.raw(tokens, self.held()))
        self.sample.extend(self.attempt, Segment(ids, [-1.0] * len(ids), ()), completion.experts)


def test_who_asks() -> None:
    """Training asks where settings and sampling say so; an evaluation never does, whatever they say."""  # P28
    room = Room()
    assert room.desk.rows_held(room.sample, "train", asked=True) == 0
    assert room.desk.rows_held(room.sample, "train", asked=False) is None
    assert room.desk.rows_held(room.sample, "eval", asked=True) is None
    room.desk.enabled = False
    assert room.desk.rows_held(room.sample, "train", asked=True) is None


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), min_size=1, max_size=5))
@virtual
async def test_however_it_is_cut_a_history_is_one_array(parts: list[list[int]]) -> None:
    """P27: rows are joined in order, the old ones released once the new are there; one handle is left."""
    room = Room()
    for ids in parts:
        await room.turn(ids)
        assert room.live == 1
    tokens = PROMPT + [token for ids in parts for token in ids]
    assert room.sample.experts is not None
    assert np.array_equal(room.sample.experts.read(), TINY.rows(tokens))
    assert room.sample.rows_missing == 0
    assert room.sample.experts.read().dtype == np.uint8
    room.sample.let_go("the test")
    assert not room.handles.live
    assert not room.handles.lost


@virtual
async def test_rows_that_did_not_come_with_their_tokens_come_with_the_next() -> None:
    """An engine that forgets them where it takes a request back: its tokens count, the next call asks further back."""
    room = Room()
    await room.turn(MADE)
    cut = await room.read(answer([50, 51], "abort"), None)
    assert cut.experts is None
    room.sample.extend(room.attempt, Segment([50, 51], [-1.0] * 2, ()), None)
    assert (room.held(), room.sample.rows_missing) == (6, 2)
    await room.turn([60])
    assert room.sample.rows_missing == 0
    assert not room.withdrawn


@virtual
async def test_whoever_answers_without_is_not_believed_again() -> None:
    """Asked for and absent on an answer with tokens: the sample's failure, said once of the worker."""  # P4
    room = Room()
    for _ in range(2):
        with pytest.raises(SampleFailure, match="experts_missing"):
            await room.read(answer(MADE), None)
    assert [event.capability for event in room.withdrawn] == ["experts"]
    nothing = await room.read(answer([], "abort"), None)  # no tokens, no rows
    assert nothing.experts is None
    with pytest.raises(SampleFailure, match="experts_missing"):
        await room.read(answer(MADE, "abort"), None, max_tokens=len(MADE))  # it will never be gone on with


WRONG = {
    "a row too few": lambda raw: raw._replace(data=raw.data[:-32]),
    "half a row": lambda raw: raw._replace(data=raw.data[:-4]),
    "no expert of this model": lambda raw: raw._replace(data=np.full(len(raw.data) // 4, 8, "<i4").tobytes()),
    "from another token": lambda raw: raw._replace(start=raw.start + 1),
}


@pytest.mark.parametrize("spoil", WRONG.values(), ids=WRONG)
@virtual
async def test_what_does_not_fit_fails_the_sample_and_changes_nothing(
    spoil: Callable[[RawExperts], RawExperts],
) -> None:
    """P27: the history it has is as it was, and nothing new is alive."""
    room = Room()
    await room.turn(MADE)
    before = room.sample.experts
    tokens = [*PROMPT, *MADE, 50, 51]
    with pytest.raises(SampleFailure, match="experts_invalid"):
        await room.read(answer([50, 51], "length"), spoil(room.raw(tokens, room.held())))
    assert room.sample.experts is before
    assert room.live == 1
    await room.turn([50, 51])


@virtual
async def test_histories_of_two_models_are_not_joined() -> None:
    """P27: rows of another shape or type do not follow those that are there."""
    room = Room()
    other = room.handles.hold(MemoryStore().put(np.zeros((2, 3, 4), np.uint8)), kind="experts", holder="s")
    room.sample.extend(room.attempt, Segment([], [], ()), other)
    with pytest.raises(
        SampleFailure, match=r"experts_invalid: .*uint8 \(4, 3, 2\) from row 2 on, after uint8 \(2, 3, 4"
    ):
        await room.read(answer(MADE), room.raw(PROMPT + MADE, 2))


@virtual
async def test_a_call_that_is_ended_leaves_nothing() -> None:
    """P27: what a thread makes for nobody is released as it comes; what it has not begun it leaves."""
    room = Room(at_once=False)
    for begin in (True, False):
        reading = asyncio.ensure_future(room.read(answer(MADE), room.raw(PROMPT + MADE, 0)))
        await soon()
        if begin:
            room.threads.begin()
            assert room.live == 1
        reading.cancel()
        await soon()
        assert len(room.desk.results) == 1
        room.threads.work()
        await soon()
        assert reading.cancelled()
        assert not room.handles.live
        assert not room.desk.results
    assert not room.handles.lost


@virtual
async def test_one_that_is_ended_just_as_it_comes_leaves_nothing_either() -> None:
    """P27: the result is there, and the task is cancelled before it runs."""
    room = Room(at_once=False)
    reading = asyncio.ensure_future(room.read(answer(MADE), room.raw(PROMPT + MADE, 0)))
    await soon()
    room.threads.work()
    reading.cancel()
    await soon()
    assert reading.cancelled()
    assert not room.handles.live


@virtual
async def test_a_history_that_goes_meanwhile_is_not_read() -> None:
    """A sample that was redone while its answer was decoded: the call counts as interrupted, not as a bug."""
    room = Room()
    await room.turn(MADE)
    room.threads.at_once = False
    reading = asyncio.ensure_future(room.read(answer([50]), room.raw([*PROMPT, *MADE, 50], room.held())))
    await soon()
    room.sample.let_go("redone")
    room.threads.work()
    with pytest.raises(Interrupted, match="redone"):
        await reading
    assert not room.handles.live


@virtual
async def test_no_room_is_a_failure_of_the_sample() -> None:
    """Counted and named, with nothing alive."""
    room = Room(store=FullStore())
    with pytest.raises(SampleFailure, match="experts_not_stored: OSError: no room"):
        await room.read(answer(MADE), room.raw(PROMPT + MADE, 0))
    assert not room.handles.live


# -- keys ----------------------------------------------------------------------------------------------------


@virtual
async def test_a_key_is_fetched_and_decoded() -> None:
    """What LMDeploy keeps in Ray becomes the same history."""
    room = Room()
    room.keys["k"] = TINY.hidden(PROMPT + MADE)
    completion = await room.read(answer(MADE), RawExperts("key", "k"))
    assert isinstance(completion.experts, Handle)
    assert np.array_equal(completion.experts.read(), TINY.rows(PROMPT + MADE))
    completion.experts.release("the test")
    with pytest.raises(SampleFailure, match="experts_missing"):
        await room.read(answer(MADE), RawExperts("key", "k"))
    assert not room.withdrawn  # it answered as it should


@virtual
async def test_a_key_is_fetched_whatever_becomes_of_its_answer() -> None:
    """P27: one that nobody fetches stays with the engine for good."""
    room = Room()

    def bad() -> Completion:
        raise SampleFailure("invalid_response", "no")

    with pytest.raises(SampleFailure, match="invalid_response"):
        await room.read(answer(MADE), RawExperts("key", "invalid"), bad)
    assert (await room.read(answer([], "abort"), RawExperts("key", "empty"))).experts is None
    room.keys["cut"] = TINY.hidden(PROMPT + MADE)
    reading = asyncio.ensure_future(room.read(answer(MADE), RawExperts("key", "cut")))
    await soon()
    reading.cancel()
    await asyncio.sleep(2.0)
    assert room.fetched == ["invalid", "empty", "cut"]
    assert not room.keys
    assert not room.tasks.live
    assert not room.handles.live


# -- the end -------------------------------------------------------------------------------------------------


@virtual
async def test_closing_leaves_nothing_and_nothing_comes_after() -> None:
    """P27: what was under way is over, and whoever comes later is turned away."""
    room = Room(at_once=False)
    reading = asyncio.ensure_future(room.read(answer(MADE), room.raw(PROMPT + MADE, 0)))
    await soon()
    reading.cancel()
    await room.desk.close()
    await room.desk.close()
    assert not room.handles.live
    assert not room.desk.results
    with pytest.raises(Interrupted, match="has stopped"):
        await room.read(answer(MADE), room.raw(PROMPT + MADE, 0))


CUTS = st.lists(st.tuples(st.sampled_from(["turn", "cancel", "revoke", "missing", "wrong", "cut"]), st.integers(1, 4)))


@given(CUTS)
@virtual
async def test_whatever_happens_the_account_is_that_of_the_sample(story: list[tuple[str, int]]) -> None:
    """P27: after each step what is alive is what the sample has, whole and its own; in the end nothing."""
    room = Room(at_once=False)
    for what, count in story:
        ids = [token % 97 for token in range(count)]
        tokens = PROMPT + room.sample.response_ids + ids
        raw = None if what in ("missing", "cut") else room.raw(tokens, room.held())
        if what == "wrong":
            assert raw is not None
            raw = raw._replace(data=bytes(raw.data)[:-32])
        finish: FinishReason = "abort" if what == "cut" else "length"
        reading = asyncio.ensure_future(room.read(answer(ids, finish), raw))
        await soon()
        if what == "cancel":
            reading.cancel()
        room.threads.work()
        await asyncio.wait({reading})
        await soon()
        if not reading.cancelled() and reading.exception() is None:
            experts = reading.result().experts
            if what == "revoke":
                room.sample.revoke()
            with pytest.raises(RolloutError) if what == "revoke" else nullcontext():
                room.sample.extend(room.attempt, Segment(ids, [-1.0] * count, ()), experts)
            room.attempt = room.sample.attempt
        assert room.live == (room.sample.experts is not None)
        if room.sample.experts is not None:
            held = PROMPT + room.sample.response_ids
            assert np.array_equal(room.sample.experts.read(), TINY.rows(held)[: room.held()])
    room.sample.let_go("the test")
    assert not room.handles.live
    assert not room.handles.lost
