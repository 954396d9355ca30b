"""A turn and its routed experts: owned by the sample once they are there, asked for in every turn or in none."""

import numpy as np
import pytest

from rollout_svc.engines import Completion
from rollout_svc.errors import Interrupted, StaleAttempt
from rollout_svc.segment import FinishReason
from rollout_svc.tensors import Handles, MemoryStore
from tests.support.caller import Table, answer
from tests.support.virtual import virtual

PROMPT = [1, 2, 3]


class Rows:
    """An account, and completions that own something of it."""

    def __init__(self) -> None:
        self.handles = Handles()

    def of(self, ids: list[int], rows: int, finish: FinishReason = "stop", *, late: bool = False) -> Completion:
        """A completion after which so many rows are there."""
        completion = answer(ids, finish, late=late)
        stored = MemoryStore().put(np.zeros((rows, 1, 1), np.uint8))
        completion.experts = self.handles.hold(stored, kind="experts", holder="s")
        return completion

    @property
    def live(self) -> int:
        """Handles that are alive."""
        return sum(tally.handles for tally in self.handles.live.values())


@virtual
async def test_a_continuation_releases_what_it_takes_the_place_of() -> None:
    """P27: after each call the sample owns one history, and nothing else is alive."""
    rows = Rows()
    table = Table(rows.of([7], 3, "abort"), rows.of([8], 4), on_pause="park", experts=True)
    await table.context().generate(PROMPT)
    assert table.sample.experts is not None
    assert table.sample.experts.shape[0] == 4
    assert rows.live == 1
    assert [asked.experts for asked in table.caller.asked] == [True, True]
    assert not table.sample.rows_missing


@virtual
async def test_what_a_revoked_attempt_brings_is_released() -> None:
    """P27: the sample was taken back while the engine worked: its rows go with the tokens."""
    rows = Rows()
    table = Table(experts=True)
    table.caller.script.append(table.then(table.hand_back, rows.of([7], 3)))
    with pytest.raises(StaleAttempt):
        await table.context().generate(PROMPT)
    assert table.sample.experts is None
    assert not rows.handles.live


@virtual
async def test_a_turn_that_wants_none_takes_those_of_all() -> None:
    """P28: what a loop asks of one turn holds for its sample, and it is no failure."""
    rows = Rows()
    table = Table(rows.of([7], 3), answer([8]), answer([9]), experts=True)
    context = table.context()
    await context.generate(PROMPT)
    settings = table.sampling.model_copy(update={"return_routed_experts": False})
    await context.generate([*PROMPT, 7], settings)
    assert not rows.handles.live
    assert table.sample.experts is None
    await context.generate([*PROMPT, 7, 8])
    assert [asked.experts for asked in table.caller.asked] == [True, False, False]
    assert not context.experts
    assert table.sampling.return_routed_experts  # the task's own settings are as they were


@virtual
async def test_a_late_answer_without_its_rows_does_not_go_to_the_judge() -> None:
    """P27: a sample that is whole but for its rows is looked at once more before it is judged."""
    for missing in (False, True):
        rows = Rows()
        table = Table(rows.of([7, 8], 2 if missing else 4, late=True), experts=True)
        context = table.context()
        with pytest.raises(Interrupted):
            await context.generate(PROMPT)
        assert context.cut == ("generate" if missing else "judge")
        table.sample.let_go("the test")


@virtual
async def test_where_they_are_off_nobody_asks() -> None:
    """P28: an evaluation's context never does."""
    table = Table(answer([7]))
    await table.context().generate(PROMPT)
    assert [asked.experts for asked in table.caller.asked] == [False]
