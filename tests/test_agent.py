"""A turn: whole or cut, continued from its own tokens within its budget, and never past a stop."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_agents.single_turn import SingleTurn
from rollout_svc.agent import OnPause
from rollout_svc.agent.work import CLEANUP_S
from rollout_svc.config import SamplingConfig
from rollout_svc.errors import Interrupted, NoWorker, SampleFailure, StaleAttempt, WorkerFailure
from rollout_svc.sample import SampleStatus
from rollout_svc.segment import VersionSpan
from tests.support.caller import Caller, Table, answer, told
from tests.support.groups import segment
from tests.support.virtual import soon, virtual

S = SampleStatus
PROMPT = [1, 2, 3]


# -- whole turns ---------------------------------------------------------------------------------------------


@virtual
async def test_a_whole_turn() -> None:
    """The engine is asked for the whole budget, and its answer is recorded and returned."""
    table = Table(answer([7, 8], "stop"))
    context = table.context()
    assert told(await context.generate(PROMPT)) == ([7, 8], [-1.0, -1.0], "stop")
    assert table.asks() == [(PROMPT, 10)]
    sample = table.sample
    assert (sample.response_ids, sample.finish_reason, sample.engine_finish_reason) == ([7, 8], "stop", "stop")
    assert (sample.turn, context.turns, context.cut, context.calling) == (1, 1, None, False)


@virtual
async def test_each_turn_has_its_own_budget() -> None:
    """`max_tokens` counts the model's tokens of one turn; settings may be given for a turn."""
    table = Table(answer([7] * 10, "length"), answer([8], "stop"))
    context = table.context()
    first = await context.generate(PROMPT)
    greedy = SamplingConfig(max_tokens=3, temperature=0.0)
    await context.generate(PROMPT + first.ids + [99], greedy)
    assert [(asked.max_tokens, asked.sampling) for asked in table.caller.asked] == [(10, table.sampling), (3, greedy)]
    assert table.asks()[1][0] == [*PROMPT, *first.ids, 99]
    assert [part.turn for part in table.sample.segments] == [0, 1]


@virtual
async def test_a_turn_is_the_agents_own() -> None:
    """What an agent does to the lists it is given changes no token of the sample."""
    table = Table(answer([7, 8]))
    turn = await table.context().generate(PROMPT)
    turn.ids.append(99)
    turn.logprobs.clear()
    assert (table.sample.response_ids, table.sample.logprobs) == ([7, 8], [-1.0, -1.0])


@virtual
async def test_single_turn_makes_one() -> None:
    """The agent that comes with the service generates once after the prompt, and gives way to a pause."""
    table = Table(answer([7]))
    assert await SingleTurn().run(table.sample, table.context()) is table.sample
    assert table.asks() == [(PROMPT, 10)]
    assert SingleTurn.on_pause == "abort"


# -- continuing ----------------------------------------------------------------------------------------------


@virtual
async def test_a_continued_turn_sends_its_prefix_and_what_is_left() -> None:
    """The next attempt goes on from the tokens there are, under the budget that is left."""  # P6, P7
    table = Table(answer([7, 8], "abort", late=True, version=3), answer([9], "stop", version=4))
    with pytest.raises(Interrupted):
        await table.context().generate(PROMPT)
    table.hand_back()
    assert told(await table.context().generate(PROMPT)) == ([7, 8, 9], [-1.0] * 3, "stop")
    assert table.asks() == [(PROMPT, 10), ([*PROMPT, 7, 8], 8)]
    assert table.sample.weight_versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3))


@virtual
async def test_a_used_up_budget_asks_for_nothing() -> None:
    """A turn whose tokens are all there is a `length`, and costs no call."""  # P6
    table = Table(max_tokens=2)
    context = table.context()
    table.sample.extend(table.sample.attempt, segment([7, 8]))
    table.sample.engine_finish_reason = "abort"
    assert (await context.generate(PROMPT)).finish_reason == "length"
    assert table.asks() == []


@pytest.mark.parametrize("late", [False, True])
def test_used_up_and_aborted_is_a_length(late: bool) -> None:
    """An abort that met the last token cut nothing off: the turn is whole, or goes to its judge."""  # P6

    @virtual
    async def run() -> None:
        table = Table(answer([7, 8], "abort", late=late), max_tokens=2)
        context = table.context()
        if late:
            with pytest.raises(Interrupted):
                await context.generate(PROMPT)
            assert context.cut == "judge"
        else:
            assert (await context.generate(PROMPT)).finish_reason == "length"

    run()


@pytest.mark.parametrize("finish", ["stop", "length"])
@virtual
async def test_a_late_whole_answer_goes_to_its_judge(finish: str) -> None:
    """An engine that had finished is not asked again: cut with its tokens, the sample resumes at its judge."""  # P6
    table = Table(answer([7, 8], "stop" if finish == "stop" else "length", late=True))
    context = table.context()
    with pytest.raises(Interrupted):
        await context.generate(PROMPT)
    sample = table.sample
    assert (context.cut, sample.status, sample.response_ids) == ("judge", S.GENERATING, [7, 8])
    assert (sample.finish_reason, sample.engine_finish_reason) == ("abort", finish)


@pytest.mark.parametrize(("finish", "ours"), [("stop", "stop"), ("length", "length")])
@virtual
async def test_nothing_is_generated_past_a_late_stop(finish: str, ours: str) -> None:
    """Also where the sample was taken back before anybody could say that it goes on at its judge."""  # P6
    table = Table(answer([7, 8], "stop" if finish == "stop" else "length", late=True))
    with pytest.raises(Interrupted):
        await table.context().generate(PROMPT)
    table.hand_back()  # its task had not come to say so
    turn = await table.context().generate(PROMPT)
    assert (turn.ids, turn.finish_reason) == ([7, 8], ours)
    assert len(table.asks()) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), st.integers(1, 12), st.integers(0, 14))
@virtual
async def test_however_a_turn_is_cut_it_is_the_same_turn(
    cuts: list[tuple[int, bool]], max_tokens: int, length: int
) -> None:
    """Cut anywhere, over any attempts: the same tokens as in one call, never past the stop nor the budget."""  # P6
    story = list(range(100, 100 + length))  # what the model says after the prompt; then it stops
    table = Table(max_tokens=max_tokens)

    class Model(Caller):
        async def generate(self, *given: object, experts: bool = False) -> object:  # type: ignore[override]
            _, _, _, input_ids, budget, _ = given
            assert isinstance(input_ids, list)
            assert isinstance(budget, int)
            assert budget > 0
            so_far = input_ids[len(PROMPT) :]
            assert so_far == story[: len(so_far)]
            assert len(so_far) + budget == max_tokens
            rest = story[len(so_far) :]
            made, late = cuts.pop(0) if cuts else (len(rest), False)
            ids = rest[: min(made, budget)]
            if len(ids) == len(rest):
                return answer(ids, "stop", late=late)
            return answer(ids, "length" if len(ids) == budget else "abort", late=late)

    table.caller = Model()
    while True:
        context = table.context()
        if table.sample.status is S.JUDGING:
            break
        try:
            await context.generate(PROMPT)
        except Interrupted:
            assert context.cut is not None
            resume_at = context.cut
            table.sample.transition(table.sample.attempt, S.ABORTED, reason="interrupted", resume_at=resume_at)
        else:
            break
    whole = story[:max_tokens]
    assert table.sample.response_ids == whole
    # A turn that was cut exactly between its last token and its stop has used up neither; one at its budget has.
    assert table.sample.finish_reason in ({"stop"} if length < max_tokens else {"stop", "length"})


# -- what an agent cannot change -----------------------------------------------------------------------------


@pytest.mark.parametrize("on_pause", ["abort", "park"])
@pytest.mark.parametrize(
    "error", [Interrupted("closed"), NoWorker("none"), WorkerFailure("http_503", "busy", accepted=True)]
)
def test_a_cut_that_is_swallowed_is_remembered(error: Exception, on_pause: OnPause) -> None:
    """An agent that catches the exception and goes on asks nobody any more: its context is over."""  # P3

    @virtual
    async def run() -> None:
        if on_pause == "park" and isinstance(error, Interrupted):
            return  # such a loop never sees it
        table = Table(error, on_pause=on_pause)
        context = table.context()
        with pytest.raises(type(error)):
            await context.generate(PROMPT)
        assert (context.cut, context.calling) == ("generate", False)
        for _ in range(3):
            with pytest.raises(Interrupted):
                await context.generate(PROMPT)
        assert len(table.asks()) == 1
        assert context.turns == 0

    run()


@pytest.mark.parametrize(("finish", "cut"), [("stop", "judge"), ("abort", "generate")])
@virtual
async def test_a_late_answer_that_is_swallowed_is_remembered(finish: str, cut: str) -> None:
    """Nor does a second call after a late answer make a second turn out of it."""  # P3
    table = Table(answer([7], "stop" if finish == "stop" else "abort", late=True))
    context = table.context()
    for _ in range(3):
        with pytest.raises(Interrupted):
            await context.generate(PROMPT)
    assert (context.cut, table.sample.response_ids, len(table.asks())) == (cut, [7], 1)


@virtual
async def test_an_invalid_answer_is_the_agents_to_see() -> None:
    """The failure comes through as it is; nothing was recorded."""  # P4
    table = Table(SampleFailure("invalid_response", "x"))
    context = table.context()
    with pytest.raises(SampleFailure, match="invalid_response"):
        await context.generate(PROMPT)
    assert (context.cut, context.calling, table.sample.response_ids) == (None, False, [])


@virtual
async def test_an_answer_after_the_hand_back_writes_nothing() -> None:
    """The attempt was revoked while the engine worked: its tokens are not recorded, and it is counted once."""  # P3
    table = Table()
    table.caller.script.append(table.then(table.hand_back, answer([7, 8])))
    context = table.context()
    with pytest.raises(StaleAttempt):
        await context.generate(PROMPT)
    sample = table.sample
    assert (sample.response_ids, sample.finish_reason, sample.turn) == ([], None, 0)
    assert table.ledger.late_discarded == 1


@virtual
async def test_a_dead_context_starts_nothing() -> None:
    """A task that swallowed its cancellation cannot start a second live request beside the new attempt's."""  # P20
    table = Table(answer([7]))
    dead = table.context()
    table.hand_back()
    alive = table.context()
    with pytest.raises(StaleAttempt):
        await dead.generate(PROMPT)
    assert table.asks() == []
    await alive.generate(PROMPT)
    assert table.sample.response_ids == [7]
    assert table.ledger.late_discarded == 1


@virtual
async def test_cancelling_a_call_propagates() -> None:
    """A cancelled turn is cancelled, and no longer counts as calling."""  # P14
    table = Table()

    async def never() -> object:
        return await asyncio.get_running_loop().create_future()

    table.caller.script.append(never)  # type: ignore[arg-type]
    context = table.context()
    task = asyncio.create_task(context.generate(PROMPT))
    await soon()
    assert context.calling
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert not context.calling


# -- more than the model's own words -------------------------------------------------------------------------


@virtual
async def test_what_the_agent_appends_is_masked_and_comes_before_the_next_turn() -> None:
    """P6: tokens of the environment have mask 0 and logprob 0.0; the next turn is asked for after them."""
    table = Table(answer([7, 8]), answer([9]))
    context = table.context()
    await context.generate()
    context.append([50, 51])
    await context.generate()
    sample = table.sample
    assert [asked for asked, _ in table.asks()] == [PROMPT, [*PROMPT, 7, 8, 50, 51]]
    assert (sample.response_ids, sample.loss_mask) == ([7, 8, 50, 51, 9], [1, 1, 0, 0, 1])
    assert sample.logprobs == [-1.0, -1.0, 0.0, 0.0, -1.0]


@virtual
async def test_a_cut_turn_after_an_appended_message_goes_on_from_its_own_tokens() -> None:
    """P6 P15: parked, the turn is continued after the gate opens: its own tokens are sent once, after the message."""
    table = Table(answer([7]), answer([8], "abort"), answer([9]), on_pause="park")
    context = table.context()
    await context.generate()
    context.append([50])
    turn = await context.generate()
    assert [asked for asked, _ in table.asks()] == [PROMPT, [*PROMPT, 7, 50], [*PROMPT, 7, 50, 8]]
    assert turn.ids == [8, 9]


@virtual
async def test_a_conversation_that_begins_again_keeps_what_was_said() -> None:
    """P6: earlier tokens are a training segment of their own, with the reason; a redone sample has its own prompt."""
    table = Table(answer([7, 8]), answer([9]))
    context = table.context()
    await context.generate()
    context.begin_again([4, 5], "history_rewritten")
    await context.generate()
    sample = table.sample
    assert table.asks()[1][0] == [4, 5]
    assert (sample.prompt_ids, sample.response_ids) == ([4, 5], [9])
    [earlier] = sample.earlier
    assert (earlier["prompt_ids"], earlier["response_ids"], earlier["reason"]) == (PROMPT, [7, 8], "history_rewritten")
    sample.transition(sample.attempt, S.INIT, reason="agent_error")
    assert (sample.prompt_ids, sample.earlier, sample.segments) == (PROMPT, [], [])


@virtual
async def test_clean_up_goes_on_when_its_waiter_is_cancelled() -> None:
    """P14: the last begun is cleaned up first; one that fails keeps no other from it; nobody cancels it."""
    table, done = Table(), list[str]()
    work = table.context().work

    async def clean(name: str) -> None:
        await asyncio.sleep(1.0)
        done.append(name)
        if name == "b":
            raise ValueError(name)

    for name in ("a", "b"):
        work.on_end(lambda name=name: clean(name))  # type: ignore[misc]
    closing = asyncio.create_task(work.close())
    await asyncio.sleep(0.5)
    closing.cancel()
    await asyncio.sleep(2.0)
    assert closing.cancelled()
    assert done == ["b", "a"]
    [told] = work.failed
    assert told.startswith("ValueError: b (")
    assert "test_agent.py:" in told


@virtual
async def test_a_clean_up_that_does_not_end_is_given_up() -> None:
    """P8 P14: also where it swallows its cancellation; the others are cleaned up, and it is told of."""
    table, done = Table(), list[str]()
    work = table.context().work

    async def deaf() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(100.0)
            except asyncio.CancelledError:
                continue

    async def good() -> None:
        done.append("good")

    work.on_end(good)
    work.on_end(deaf)
    await work.close()
    assert (asyncio.get_running_loop().time(), done, work.failed) == (CLEANUP_S, ["good"], ["not done in 10 s"])
    await asyncio.sleep(1000.0)
    assert not table.tasks.live
