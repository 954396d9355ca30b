"""P29: the end of a step, in virtual time, with processes that fail, hang, die, return and come late."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_svc.errors import DrainFailed
from rollout_svc.tensors.clearing import Cleared, Consumer, Controller
from rollout_svc.tensors.shards import Plane
from tests.support.peers import FakePeer, remote, stats_of
from tests.support.virtual import soon, virtual

OWNER = "http://owner"
DEADLINE_S = 10.0


class House:
    """A controller whose processes are made when they are first reached."""

    def __init__(self, *consumers: str, **settings: Any) -> None:
        self.peers: dict[str, FakePeer] = {}
        self.controller = Controller(Plane(), connect=self.peer, deadline_s=DEADLINE_S, **settings)
        for place, name in enumerate(consumers):
            self.controller.register("actor", [Consumer(name, (place, 0), "1")])

    def peer(self, address: str) -> FakePeer:
        return self.peers.setdefault(address, FakePeer())

    async def clear(self, *ids: str, owner: str = OWNER) -> Cleared:
        return await self.controller.clear_batches([remote(one, owner) for one in ids])


@virtual
async def test_every_consumer_of_every_role_and_every_owner_is_told() -> None:
    """P29: owners drop what is theirs; everybody drains the flat list, in the tree's order, without doubles."""
    house = House("a", "b")
    house.controller.register("teacher", ["c", "a"])
    tree = {"x": [remote("1", "http://o1"), remote("2", "http://o2")], "y": (remote("1", "http://o1"), "text", None)}
    cleared = await house.controller.clear_batches(tree)
    assert house.peers["http://o1"].asked == [("drop", ("1",)), ("drain", ("1", "2"))]
    assert house.peers["http://o2"].asked == [("drop", ("2",)), ("drain", ("1", "2"))]
    for name in "abc":
        assert house.peers[name].asked == [("drain", ("1", "2"))]
    assert (cleared.ids, cleared.processes) == (2, 5)


@virtual
async def test_nobody_is_left_out_by_a_slip() -> None:
    """P29: two processes on one rank, or one address for a list, would leave consumers that are never drained."""
    house = House("a", "b")
    with pytest.raises(ValueError, match=r"critic\[0\]: expected one process, not c and d"):
        house.controller.register("critic", [Consumer("c", (0,)), Consumer("d", (0,))])
    with pytest.raises(TypeError, match=r"not one address: \['http://c'\]"):
        house.controller.register("critic", "http://c")
    assert (await house.clear("1")).processes == 3
    assert not {"c", "d"} & house.peers.keys()


@virtual
async def test_a_rank_that_is_given_nothing_does_nothing() -> None:
    """P29: `clear_batches()` and `clear_batches(None)`, also within a step, also where something is kept."""
    house = House("a")
    house.peer("a").failures = [OSError("refused")] * 3
    await house.clear("1")
    house.peers["a"].asked.clear()
    assert await house.controller.clear_batches() == Cleared()
    assert await house.controller.clear_batches(None) == Cleared()
    async with house.controller.step(None) as step:
        pass
    assert step.cleared == Cleared()
    assert house.peers["a"].asked == []


@virtual
async def test_one_that_hangs_costs_the_others_nothing_and_the_call_ends_in_time() -> None:
    """P29: not even if it swallows its cancellation."""
    house = House("a", "b")
    house.peer("a").hangs = house.peer("a").deaf = True
    loop = asyncio.get_running_loop()
    clearing = loop.create_task(house.clear("1"))
    await soon(20)
    assert house.peers["b"].asked == house.peers[OWNER].asked[1:] == [("drain", ("1",))]
    assert loop.time() == 0
    cleared = await clearing
    assert loop.time() <= DEADLINE_S
    assert [(one.process, one.why) for one in cleared.kept] == [("a", "no answer in time")]
    house.peers["a"].hangs = house.peers["a"].deaf = False
    await house.controller.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@virtual
async def test_one_that_hangs_once_is_asked_again_in_time() -> None:
    """P29: an attempt may not take what is left of the deadline, and what it was is not left behind."""
    house = House("a", "b")
    house.peer("a").hangs = house.peer("b").hangs = True
    asyncio.get_running_loop().call_later(1.0, setattr, house.peers["a"], "hangs", False)
    cleared = await house.clear("1")
    assert [one.process for one in cleared.kept] == ["b"]
    assert house.peers["a"].ids() == [("1",), ("1",)]
    await soon()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await house.controller.close()


@virtual
async def test_what_failed_is_tried_again_within_the_call() -> None:
    """P29: a few times, with pauses that grow."""
    house = House("a")
    house.peer("a").failures = [OSError("reset"), TimeoutError()]
    cleared = await house.clear("1")
    assert cleared.kept == ()
    assert house.peers["a"].asked == [("drain", ("1",))] * 3


@virtual
async def test_what_failed_in_two_steps_is_reported_after_everything_else_is_done() -> None:
    """P29: kept for one step, then raised, naming who and how many; and never tried again."""
    house = House("a", "b", attempts=1)
    house.peer("a").failures = [OSError("refused")] * 2
    assert [str(one) for one in (await house.clear("1", "2")).kept] == ["a did not drain 2 ids: OSError: refused"]
    with pytest.raises(DrainFailed, match=r"^a did not drain 2 ids: OSError: refused$") as failed:
        await house.clear("3")
    assert house.peers["b"].ids()[-1] == house.peers[OWNER].ids("drop")[-1] == ("3",)
    assert [one.ids for one in failed.value.cleared.kept] == [("3",)]
    await house.clear("4")
    assert house.peers["a"].ids() == [("1", "2"), ("1", "2", "3"), ("3", "4")]


@virtual
async def test_an_owner_that_fails_deletes_is_asked_again_with_the_next_step() -> None:
    """P29: also when that step has nothing of this owner."""
    house = House(attempts=1)
    house.peer(OWNER).failures = [OSError("busy")]
    assert [one.verb for one in (await house.clear("1")).kept] == ["drop"]
    cleared = await house.clear("2", owner="http://another")
    assert house.peers[OWNER].ids("drop") == [("1",), ("1",)]
    assert cleared.kept == ()


@virtual
async def test_a_consumer_that_returned_is_not_owed_what_it_never_had() -> None:
    """P29: whether it registers anew, takes its rank elsewhere, or is only found to be another one by its figures."""
    house = House("a", "b", "c", attempts=1)
    for name in "abc":
        house.peer(name).failures = [OSError("refused")]
    assert len((await house.clear("1")).kept) == 3
    house.controller.register("actor", [Consumer("a", (0, 0), "2"), Consumer("new", (1, 0), "1")])
    await house.clear("2")
    assert house.peers["a"].ids()[-1] == house.peers["new"].ids()[-1] == ("2",)
    assert len(house.peers["b"].ids()) == 1
    house.peers["c"].failures = [OSError("refused")]
    house.peers["c"].told = stats_of(incarnation="2")
    await house.clear("3")
    await house.clear("4")
    assert house.peers["c"].ids() == [("1",), ("1", "2"), ("3",), ("4",)]


@virtual
async def test_one_that_comes_during_a_clear_is_part_of_it() -> None:
    """P29: it may have fetched something of the batch before it was known."""
    house = House("a")
    house.peer("a").hangs = True
    clearing = asyncio.get_running_loop().create_task(house.clear("1"))
    await soon()
    house.controller.register("late", ["b"])
    await soon()
    assert house.peers["b"].ids() == [("1",)]
    await clearing


@virtual
async def test_a_role_that_was_let_go_is_not_asked() -> None:
    """P29: a process is a consumer until no role names it."""
    house = House("a", "b")
    house.controller.register("critic", ["b"])
    house.controller.unregister("actor")
    house.controller.unregister("actor")
    await house.clear("1")
    assert "a" not in house.peers
    house.controller.unregister("critic", (0,))
    await house.clear("2")
    assert house.peers["b"].ids() == [("1",)]


@virtual
async def test_the_other_two_verbs_leave_owners_what_they_own() -> None:
    """P29: `drain` is of ids, `flush_all` of everything; neither drops."""
    house = House("a")
    await house.controller.drain(["1", "1", "2"])
    await house.controller.flush_all()
    assert house.peers["a"].asked == [("drain", ("1", "2")), ("flush", ())]
    house.peers["a"].failures = [OSError("refused")] * 6
    await house.controller.flush_all()
    with pytest.raises(DrainFailed, match="a did not flush all it fetched"):
        await house.controller.flush_all()


@virtual
async def test_a_step_clears_however_it_ends_and_its_own_error_wins() -> None:
    """P29: in `finally`; what else failed is noted on the error that the step raised."""
    house = House("a", attempts=1)
    house.peer("a").failures = [OSError("refused")] * 2
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the step is what raises
        async with house.controller.step([remote("1")]) as step:
            step.add({"advantages": remote("2")})
            _ = 1 / 0
    assert house.peers["a"].ids() == [("1", "2")]
    with pytest.raises(ValueError, match="the loss is not a number") as failed:
        async with house.controller.step(remote("3")) as step:
            raise ValueError("the loss is not a number")
    assert failed.value.__notes__ == ["a did not drain 2 ids: OSError: refused"]
    assert step.cleared is not None
    assert len(step.cleared.given_up) == 1


@virtual
async def test_a_step_that_went_well_raises_what_could_not_be_drained() -> None:
    """P29: it is not lost where nothing else failed."""
    house = House("a", attempts=1)
    house.peer("a").failures = [OSError("refused")] * 2
    async with house.controller.step(remote("1")):
        pass
    with pytest.raises(DrainFailed):
        async with house.controller.step(remote("2")):
            pass


@virtual
async def test_a_decorated_step_clears_what_it_was_given_and_what_it_returns() -> None:
    """P29: also by keyword."""
    house = House("a")

    @house.controller.clears
    async def train(batch: Any, *, values: Any) -> Any:
        assert (batch.shard.id, values.shard.id) == ("1", "2")
        return [remote("3")]

    await train(remote("1"), values=remote("2"))
    assert house.peers["a"].ids() == [("1", "2", "3")]


@virtual
async def test_a_clear_that_is_cancelled_propagates_and_loses_nothing() -> None:
    """P29, P14: what was not done is part of the next one, and nothing of it counts as live for ever."""
    house = House("a")
    house.peer("a").hangs = True
    clearing = asyncio.get_running_loop().create_task(house.clear("1"))
    await soon()
    clearing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await clearing
    await soon()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    house.peers["a"].hangs = False
    await house.clear("2")
    assert house.peers["a"].ids() == [("1",), ("1", "2")]
    assert house.controller.live() == 0


@virtual
async def test_two_clears_at_once_stand_in_line() -> None:
    """P29: each has its own ids and its own report, and neither takes the other's batch for a leak."""
    house = House("a")
    house.peer("a").told = stats_of("2")
    with capture_logs() as logs:
        first, second = await asyncio.gather(house.clear("1"), house.clear("2"))
    assert house.peers["a"].ids() == [("1",), ("2",)]
    assert (first.ids, second.ids) == (1, 1)
    assert first.leaks == ()
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["shards.leaked"]


@virtual
async def test_statistics_that_fail_do_not_fail_a_step() -> None:
    """P29: nor do those that are nonsense; both are named, with a warning."""
    house = House("a", "b", "c")
    house.peer("a").stats_error = OSError("refused")
    house.peer("b").told = {"owner": 7, "buffer": {"entries": "many"}}
    with capture_logs() as logs:
        cleared = await house.clear("1")
    assert cleared.statistics.silent == ("a", "b")
    assert [(log["log_level"], log["process"], log["roles"]) for log in logs if "statistics" in log["event"]] == [
        ("warning", "a", ("actor[0,0]",)),
        ("warning", "b", ("actor[1,0]",)),
    ]


@virtual
async def test_a_leak_is_a_warning_and_a_clean_end_is_debug() -> None:
    """P29: the warning says which process and rank, how much, and a few ids."""
    house = House("a", "b")
    with capture_logs() as logs:
        assert (await house.clear("1")).leaks == ()
        house.peers["b"].told = stats_of("lost", "0", incarnation="1")
        (leak,) = (await house.clear("2")).leaks
    clean, leaked = logs
    assert (clean["log_level"], clean["event"]) == ("debug", "shards.cleared")
    assert leaked == {
        "log_level": "warning",
        "event": "shards.leaked",
        "process": "b",
        "roles": ("actor[1,0]",),
        "where": "buffer",
        "entries": 2,
        "bytes": 20,
        "ids": ("lost", "0"),
    }
    assert leak.ids == ("lost", "0")


@virtual
async def test_what_is_live_is_no_leak_until_it_is_cleared() -> None:
    """P29: the batch that comes next may be there already."""
    house = House("a")
    house.controller.live([remote("next")])
    house.peer("a").told = stats_of("next")
    assert (await house.clear("1")).leaks == ()
    (leak,) = (await house.clear("next")).leaks
    assert leak.ids == ("next",)
    await house.controller.close()


@virtual
async def test_what_becomes_live_while_the_processes_are_asked_is_no_leak() -> None:
    """P29: somebody may have fetched it by then."""
    house = House("a")

    class Meanwhile(FakePeer):
        async def stats(self) -> dict[str, Any]:
            house.controller.live(remote("next"))
            return stats_of("next")

    house.peers["a"] = Meanwhile()
    assert (await house.clear("1")).leaks == ()
    await house.controller.close()


@virtual
async def test_an_owner_that_is_gone_is_not_asked_for_ever() -> None:
    """P29: one that owns nothing live and does not answer is asked again when a batch names it."""
    house = House()
    house.peer(OWNER).stats_error = OSError("refused")
    assert (await house.clear("1")).statistics.silent == (OWNER,)
    assert (await house.clear("2", owner="http://another")).statistics.silent == ()
    assert (await house.clear("3")).statistics.silent == (OWNER,)


@virtual
async def test_leases_of_live_batches_are_renewed_until_they_are_cleared() -> None:
    """P29: one request to each owner, and one that does not answer holds up no other."""
    house = House(renew_s=60.0)
    house.controller.live([remote("1"), remote("2"), remote("3", "http://gone")])
    house.peer("http://gone").renew = None  # type: ignore[assignment, method-assign] # calling it is an error
    with capture_logs() as logs:
        await asyncio.sleep(130)
    assert house.peers[OWNER].renewed == [(60.0, ("1", "2")), (120.0, ("1", "2"))]
    assert [log["process"] for log in logs if log["event"] == "shards.renewal_failed"] == ["http://gone"] * 2
    await house.clear("1", "2")
    await asyncio.sleep(130)
    assert len(house.peers[OWNER].renewed) == 2
    await house.controller.close()
    await house.controller.close()
