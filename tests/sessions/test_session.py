"""Turns of a session: the ids are ours, whatever the client sends back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.chat_template import ChatTemplate
from rollout_svc.errors import NotNow, SampleFailure
from rollout_svc.sessions.exchange import Asked
from rollout_svc.sessions.session import Session
from rollout_svc.tokens import ByteTokenizer
from tests.support.caller import Table, answer
from tests.support.virtual import soon, virtual

TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }};{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
MORE: dict[str, Any] = {"role": "user", "content": "on"}
ASKED = list(b"<u>hi;<a>")


def begin(table: Table, hold_s: float = 1.0) -> Session:
    """Make a session of the table's sample."""
    table.tokenizer = ByteTokenizer(ChatTemplate(TEMPLATE, {}).render)
    return Session("s", "key", table.sample, table.context(), form="hermes", hold_s=hold_s)


def words(text: str, finish: Any = "stop") -> Any:
    """An engine's answer, in bytes."""
    return answer(list(text.encode()), finish)


@virtual
async def test_turns_grow_by_exact_ids() -> None:
    """P6: the second prompt is the first one, what was made, and the new message; the sample is all of it."""
    table = Table(words("yo"), words("ok"), on_pause="park")
    session = begin(table)
    first = await session.turn(Asked((USER,)))
    assert (first.said.content, first.end, first.prompt_tokens, first.completion_tokens) == (
        "yo",
        "stop",
        len(ASKED),
        2,
    )
    await session.turn(Asked((USER, first.said.as_message(), MORE)))
    prefix = [*ASKED, *b"yo", *b";<u>on;<a>"]
    assert [asked for asked, _ in table.asks()] == [ASKED, prefix]
    sample = table.sample
    assert sample.prompt_ids + sample.response_ids == [*prefix, *b"ok"]
    assert sample.loss_mask == [1] * 2 + [0] * len(b";<u>on;<a>") + [1] * 2
    assert sample.earlier == []


SYSTEM: dict[str, Any] = {"role": "system", "content": "be"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@virtual
@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ((SYSTEM, USER, {"role": "assistant", "content": "YO"}, MORE), (), "history_rewritten: message 2 of 4"),
        ((SYSTEM, USER, MORE), (), "history_rewritten: message 2 of 3"),
        ((SYSTEM, USER, {"role": "assistant", "content": "yo"}, MORE), (TOOL,), "tools_changed"),
        ((SYSTEM, USER), (TOOL,), "tools_changed"),
        ((SYSTEM, USER), (), "asked_again"),
        ((SYSTEM, MORE), (), "another_conversation"),
        ((MORE,), (TOOL,), "another_conversation"),
    ],
)
async def test_a_rewritten_history_begins_another_training_segment(
    messages: tuple[dict[str, Any], ...], tools: tuple[dict[str, Any], ...], reason: str
) -> None:
    """P6: with the reason; what was said before is kept as it was."""
    table = Table(words("yo"), words("ok"), on_pause="park")
    session = begin(table)
    await session.turn(Asked((SYSTEM, USER)))
    await session.turn(Asked(messages, tools))
    [earlier] = table.sample.earlier
    assert (earlier["response_ids"], earlier["reason"]) == (list(b"yo"), reason)
    said = b"".join(f"<{one['role'][0]}>{one['content']};".encode() for one in messages)
    assert table.sample.prompt_ids == [*said, *b"<a>"]


@virtual
@pytest.mark.parametrize(
    ("text", "told", "stopped_by"),
    [("do\nSee:", "do\n", "See:"), ("do\nSee: i", "do\n", "See:"), ("See:", "", "See:"), ("done", "done", None)],
    ids=["at its end", "within its last token", "at once", "not"],
)
async def test_a_text_that_a_client_stops_at_is_not_told(text: str, told: str, stopped_by: str | None) -> None:
    """P6: as both APIs have it; its ids are the turn's, and the conversation goes on from them."""
    table = Table(words(text), words("ok"), on_pause="park")
    session = begin(table)
    turn = await session.turn(Asked((USER,), stop=("never", "See:")))
    assert (turn.said.content, turn.stopped_by, turn.end) == (told, stopped_by, "stop")
    assert table.sample.response_ids == list(text.encode())
    await session.turn(Asked((USER, turn.said.as_message(), MORE)))
    assert table.asks()[1][0] == [*ASKED, *text.encode(), *b";<u>on;<a>"]
    assert table.sample.earlier == []


@virtual
async def test_a_stop_of_the_task_is_told() -> None:
    """It is no client's: what the model was trained to end with is its own words."""
    table = Table(words("do\nSee:"), on_pause="park")
    turn = await begin(table).turn(Asked((USER,)))
    assert (turn.said.content, turn.stopped_by) == ("do\nSee:", None)


@virtual
async def test_a_turn_that_nobody_waits_for_leaves_nothing() -> None:
    """P15: the client goes; its tokens and its message are forgotten, and asked again it is as if it never was."""

    async def never() -> Any:
        await asyncio.get_running_loop().create_future()

    table = Table(words("yo"), never, words("ok"), on_pause="park")
    session = begin(table)
    said = (await session.turn(Asked((USER,)))).said.as_message()
    going = asyncio.create_task(session.turn(Asked((USER, said, MORE))))
    await asyncio.sleep(0.1)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert table.sample.response_ids == list(b"yo")
    await session.turn(Asked((USER, said, MORE)))
    assert table.asks()[1] == table.asks()[2]
    assert table.sample.earlier == []


@virtual
async def test_a_whole_turn_that_nobody_is_told_of_leaves_nothing() -> None:
    """P15: its client goes while it is read: asked again, it is made again, and only that is trained on."""
    table = Table(words("yo"), words("no", "length"), words("ok"), on_pause="park")
    session = begin(table)
    said = (await session.turn(Asked((USER,)))).said.as_message()
    reading, gone = table.tokenizer.decode, asyncio.create_task(session.turn(Asked((USER, said, MORE))))

    def leave(ids: Any) -> str:
        gone.cancel()
        return reading(ids)

    table.tokenizer.decode = leave  # type: ignore[method-assign]
    table.tokenizer.cheap = False  # it reads in a thread, and so is waited for
    await asyncio.gather(gone, return_exceptions=True)
    assert gone.cancelled()
    sample = table.sample
    assert (sample.response_ids, sample.turn, sample.finish_reason) == (list(b"yo"), 1, "stop")
    del table.tokenizer.decode
    await session.turn(Asked((USER, said, MORE)))
    assert table.asks()[1] == table.asks()[2]
    assert (sample.earlier, sample.response_ids) == ([], list(b"yo;<u>on;<a>ok"))


@virtual
async def test_a_history_whose_turn_was_never_told_was_not_rewritten() -> None:
    """P15: the sample is what was said last, for its judger too, and goes on from there in the same segment."""
    refused = SampleFailure("rejected_by_engine", "no")
    table = Table(words("yo"), refused, words("ok"), on_pause="park")
    session = begin(table)
    said = (await session.turn(Asked((USER,)))).said.as_message()
    with pytest.raises(SampleFailure):
        await session.turn(Asked((MORE,)))
    sample = table.sample
    assert (sample.prompt_ids, sample.response_ids, sample.earlier) == (ASKED, list(b"yo"), [])
    await session.turn(Asked((USER, said, MORE)))
    assert (sample.prompt_ids, sample.earlier) == (ASKED, [])
    assert sample.response_ids == list(b"yo;<u>on;<a>ok")


@virtual
async def test_a_sample_ends_as_its_last_told_turn_did() -> None:
    """P2: a pause cuts a turn, its client leaves, and its agent ends: the sample is no aborted one."""
    table = Table(words("yo"), words("no", "abort"), on_pause="park")
    session = begin(table)
    said = (await session.turn(Asked((USER,)))).said.as_message()
    going = asyncio.create_task(session.turn(Asked((USER, said, MORE))))
    await soon(10)
    assert table.sample.finish_reason == "abort"
    table.withdraw()
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    sample = table.sample
    assert (sample.finish_reason, sample.engine_finish_reason, sample.response_ids) == ("stop", "stop", list(b"yo"))


@virtual
async def test_a_turn_waits_for_the_gate_and_is_refused_in_time() -> None:
    """P15: 503 and when to ask again after `hold_s`; one that a pause cuts is whole when it is answered."""
    table = Table(words("yo", "abort"), words("!"), on_pause="park")
    session = begin(table)
    table.withdraw()
    with pytest.raises(NotNow, match="paused"):
        await session.turn(Asked((USER,)))
    table.gate.open(["train"])
    assert (await session.turn(Asked((USER,)))).said.content == "yo!"


@virtual
async def test_a_turn_that_waited_behind_another_waits_for_the_gate_too() -> None:
    """P15: the lane closed meanwhile: nothing new starts, and it is refused when it has waited long enough."""
    release = asyncio.Event()

    async def held() -> Any:
        await release.wait()
        return words("yo")

    table = Table(held, words("ok"), on_pause="park")
    session = begin(table)
    one, other = (asyncio.create_task(session.turn(Asked((said,)))) for said in (USER, MORE))
    await soon(10)
    table.gate.close(["train"], "wait")
    release.set()
    assert (await one).said.content == "yo"
    with pytest.raises(NotNow, match="paused"):
        await other
    assert len(table.caller.asked) == 1


@virtual
async def test_a_client_may_ask_for_less() -> None:
    """Fewer tokens, more stops; the task's own settings are what is trained with."""
    table = Table(words("y", "length"), max_tokens=10, on_pause="park")
    session = begin(table)
    turn = await session.turn(Asked((USER,), max_tokens=1, temperature=0.0, stop=("\n",)))
    [asked] = table.caller.asked
    assert (asked.max_tokens, asked.sampling.temperature, asked.sampling.stop) == (1, 1.0, ("\n",))
    assert turn.end == "length"


@virtual
async def test_what_is_asked_for_again_is_not_made_again() -> None:
    """Settings that two turns have in common are the same object, whose parameters a dialect keeps; others are not."""
    table = Table(*[words("y", "stop") for _ in range(4)], max_tokens=10, on_pause="park")
    session = begin(table)
    for most in (None, 3, 3, None):
        await session.turn(Asked((USER,), max_tokens=most))
    first, less, again, last = [asked.sampling for asked in table.caller.asked]
    assert first is table.sampling
    assert again is less
    assert [one.max_tokens for one in (first, less, last)] == [10, 3, 10]


@virtual
async def test_a_session_whose_sample_was_taken_is_over() -> None:
    """P5: it makes no more turns, and takes no reward."""
    table = Table(on_pause="park")
    session = begin(table)
    table.hand_back()
    assert session.over
    with pytest.raises(SampleFailure, match="over"):
        session.report(1.0)


@pytest.mark.parametrize(
    ("said", "finish", "tools", "end"),
    [
        ('<tool_call>{"name": "add", "argum', "length", True, "length"),
        ("<tool_call>{oops}</tool_call>", "stop", True, "stop"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "stop", False, "stop"),
    ],
    ids=["cut", "no JSON", "no tools"],
)
def test_what_nobody_could_call_is_text(said: str, finish: Any, tools: bool, end: str) -> None:
    """A call without a name, or to whoever gave no tools, would end a client: it is told as servers tell it."""

    @virtual
    async def run() -> None:
        table = Table(words(said, finish), words("ok"), on_pause="park")
        session = begin(table)
        given = ({"type": "function", "function": {"name": "add", "parameters": {}}},) if tools else ()
        turn = await session.turn(Asked((USER,), tools=given))
        assert (turn.said.content, turn.said.calls, turn.end) == (said, (), end)
        await session.turn(Asked((USER, {"role": "assistant", "content": said}, MORE), tools=given))
        assert table.sample.earlier == []

    run()
