"""The room of sessions: who is let in, who is told what, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.chat_template import ChatTemplate
from rollout_svc.config import SessionsConfig
from rollout_svc.errors import Gone, NotFound, NotNow, Unauthorized, WorkerFailure
from rollout_svc.segment import Segment
from rollout_svc.sessions.exchange import Asked
from rollout_svc.sessions.registry import Sessions
from rollout_svc.tasks import TaskOwner
from rollout_svc.tokens import ByteTokenizer
from tests.support.caller import Table, answer
from tests.support.session_site import TEMPLATE
from tests.support.virtual import soon, virtual

ASKED = Asked(({"role": "user", "content": "hi"},))


def table(*script: Any) -> Table:
    """One sample, whose model speaks in bytes."""
    made = Table(*script, on_pause="park")
    made.tokenizer = ByteTokenizer(ChatTemplate(TEMPLATE, {}).render)
    return made


def room(made: Table, **settings: Any) -> Sessions:
    """An empty room behind a sample's gate."""
    found = Sessions(SessionsConfig(**settings), tasks=TaskOwner(), gate=made.gate)
    found.address = lambda: "http://here/"
    return found


@virtual
async def test_a_key_finds_its_session_until_it_is_over_and_then_learns_so() -> None:
    """P34: 401 for another key whether it is open or over, 404 for what never was, 410 for what is over."""
    made = table()
    sessions = room(made)
    session = await sessions.open(made.sample, made.context())
    assert sessions.base_url(session) == f"http://here/sessions/{session.session_id}"
    for _ in range(2):
        with pytest.raises(Unauthorized):
            sessions.find(session.session_id, "another")
        with pytest.raises(Unauthorized):
            sessions.find(session.session_id, "\udcff")
        with pytest.raises(NotFound):
            sessions.find("never", session.key)
        if session.ended.done():
            for key in (session.key, None):
                with pytest.raises(Gone):
                    sessions.find(session.session_id, key)
        else:
            assert sessions.find(session.session_id, session.key) is session is sessions.find(session.session_id, None)
            await sessions.close(session)
            await sessions.close(session)
    assert sessions.as_json()["open"] == 0


@virtual
async def test_who_finds_no_room_waits_for_it_in_turn_and_not_for_ever() -> None:
    """P18: nothing is counted against a sample that found none."""
    made = table()
    sessions = room(made, max=1, ttl_s=5.0)
    first = await sessions.open(made.sample, made.context())
    second, third, last = table(), table(), table()
    waiting = asyncio.create_task(sessions.open(second.sample, second.context()))
    await soon()
    assert not waiting.done()
    await sessions.close(first)
    await sessions.close(await waiting)
    held = await sessions.open(third.sample, third.context())
    with pytest.raises(WorkerFailure, match="no_room"):
        await sessions.open(last.sample, last.context())
    await sessions.close(held)


@virtual
async def test_what_is_left_of_an_earlier_try_is_forgotten() -> None:
    """P6: tokens of a turn that was cut, and a reward of another life, are none of this session's."""
    made = table()
    context = made.context()
    made.sample.extend(made.sample.attempt, Segment([1, 2], [-1.0, -1.0], ()))
    made.sample.meta = {"reported_reward": 1.0, "kept": True}
    sessions = room(made)
    session = await sessions.open(made.sample, context)
    assert (made.sample.response_ids, made.sample.meta) == ([], {"kept": True})
    await sessions.close(session)


@virtual
async def test_a_session_that_was_offered_goes_to_one_agent() -> None:
    """In order; one that leaves as it is handed over does not take it along."""
    made = table()
    sessions = room(made)
    with pytest.raises(NotNow, match="no sample"):
        await sessions.claim("task", 1.0)
    session = await sessions.open(made.sample, made.context())
    task = session.prompt.task
    leaving = asyncio.create_task(sessions.claim(task, 9.0))
    await soon()
    sessions.offer(session)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert sessions.as_json()["waiting_for_agent"] == 1
    assert await sessions.claim(task, 0.0) is session
    assert sessions.as_json()["waiting_for_agent"] == 0
    with pytest.raises(NotNow):
        await sessions.claim(task, 0.0)
    await sessions.close(session)


@virtual
async def test_times_do_not_run_during_a_pause() -> None:
    """A pause of an hour ends no session; its own time does."""
    made = table()
    sessions = room(made, ttl_s=10.0)
    session = await sessions.open(made.sample, made.context(), timeout_s=10.0)
    made.withdraw()
    await asyncio.sleep(3600)
    assert not session.ended.done()
    made.gate.open(["train"])
    await asyncio.sleep(9)
    assert not session.ended.done()
    await asyncio.sleep(2)
    assert "agent_timeout" in str(session.failure)
    await sessions.close(session)


@virtual
async def test_closing_ends_the_turn_that_is_under_way() -> None:
    """Its client is told that the session is over; of the turn there is nothing."""

    async def never() -> Any:
        await asyncio.get_running_loop().create_future()

    made = table(never)
    sessions = room(made)
    session = await sessions.open(made.sample, made.context())
    turn = sessions.begin(session, ASKED)
    await soon(20)
    assert sessions.turn_of(session) is turn
    await sessions.close(session)
    with pytest.raises(Gone):
        sessions.outcome(turn)
    assert made.sample.response_ids == []


@virtual
async def test_a_sample_that_goes_back_takes_its_session_along() -> None:
    """P5: no worker could take the turn: the session is over, with the worker's words; its client is told 410."""
    made = table(WorkerFailure("http_503", "w: busy"))
    sessions = room(made)
    session = await sessions.open(made.sample, made.context())
    turn = sessions.begin(session, ASKED)
    await asyncio.wait({turn})
    with pytest.raises(Gone):
        sessions.outcome(turn)
    assert isinstance(session.failure, WorkerFailure)
    await sessions.close(session)


@virtual
async def test_a_turn_that_cannot_be_read_is_not_trained_on() -> None:
    """P6: nobody was told of it: it is no part of what is said next, nor a segment of its own."""
    made = table(answer(list(b"yo")), answer(list(b"ok")), answer(list(b"hm")))
    sessions = room(made)
    session = await sessions.open(made.sample, made.context())
    first = sessions.begin(session, ASKED)
    await asyncio.wait({first})
    said = sessions.outcome(first).said.as_message()
    made.tokenizer.decode = lambda _: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    more = ASKED._replace(messages=(*ASKED.messages, said, {"role": "user", "content": "on"}))
    broken = sessions.begin(session, more)
    await asyncio.wait({broken})
    assert broken.exception() is not None
    del made.tokenizer.decode
    again = sessions.begin(session, more)
    await asyncio.wait({again})
    assert sessions.outcome(again).said.content == "hm"
    assert bytes(made.caller.asked[-1].input_ids).decode() == "<u>hi;<a>yo;<u>on;<a>"
    assert made.sample.prompt_ids == list(b"<u>hi;<a>")
    assert (made.sample.response_ids, made.sample.earlier) == (list(b"yo;<u>on;<a>hm"), [])
    await sessions.close(session)


@virtual
async def test_turns_that_a_pause_holds_wait_side_by_side() -> None:
    """P15: three at once, and each is refused after `hold_s`; nothing of them is left."""
    made = table(answer(list(b"yo")))
    sessions = room(made, hold_s=1.0)
    session = await sessions.open(made.sample, made.context())
    made.withdraw()
    began = asyncio.get_running_loop().time()
    turns = [sessions.begin(session, ASKED) for _ in range(3)]
    await asyncio.wait(turns)
    assert asyncio.get_running_loop().time() - began < 1.1
    for turn in turns:
        with pytest.raises(NotNow, match="paused"):
            sessions.outcome(turn)
    made.gate.open(["train"])
    last = sessions.begin(session, ASKED)
    await asyncio.wait({last})
    assert sessions.outcome(last).said.content == "yo"
    await sessions.close(session)
