"""Several services that are one to a trainer, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_svc.errors import BadRequest, Conflict, NotFound, NotNow
from rollout_svc.sharding.coordinator import Coordinator
from tests.sharding.stage import DISK, check_books, staged, until
from tests.support.virtual import virtual


def ids(batch: dict[str, Any]) -> list[str]:
    """The groups of a batch."""
    return [group["group_id"] for group in batch["groups"]]


@virtual
async def test_a_batch_is_taken_from_all_and_acknowledged_once() -> None:
    """P1, P2: a batch has the groups asked for, from all shards; the same step: the same batch; an ack is for good."""
    async with staged() as (coordinator, _one, _other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        assert len(ids(batch)) == len(set(ids(batch))) == 6
        assert {name.partition(":")[0] for name in ids(batch)} == {"s0", "s1"}
        assert batch["metrics"]["groups"] == 6
        assert ids(await coordinator.take_batch(0, 6, 10.0)) == ids(batch)
        assert (await coordinator.status())["buffer"]["leases"] == [
            {"batch_id": batch["batch_id"], "step": 0, "groups": 6}
        ]
        for _ in range(2):
            assert (await coordinator.ack(batch["batch_id"]))["acknowledged"]
        status = await coordinator.status()
        assert status["ledger"]["groups"]["consumed"] == 6
        after = await coordinator.take_batch(1, 4, 10.0, ack=[batch["batch_id"]])
        assert not set(ids(after)) & set(ids(batch))
        with pytest.raises(NotFound):
            await coordinator.ack("never")
        check_books(coordinator)


@virtual
async def test_a_slow_shard_is_made_up_for() -> None:
    """A batch does not wait for a shard that lags where the others have enough."""
    async with staged() as (coordinator, _, other):
        other.pace_s = 1000.0
        batch = await coordinator.take_batch(0, 8, 20.0)
        assert len(ids(batch)) == 8


@virtual
async def test_a_shortage_names_the_shard_that_lacks() -> None:
    """P22: a take that cannot be met says within its timeout which shard lacks what, and loses nothing."""
    async with staged() as (coordinator, one, other):
        other.die()
        one.room = 3
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(NotNow) as error:
            await coordinator.take_batch(0, 8, 3.0)
        assert loop.time() - began <= 3.1
        told = error.value.detail["shards"]
        assert (error.value.type, error.value.detail["ready"], error.value.detail["can_be_met"]) == (
            "not_enough",
            3,
            True,
        )
        assert (told["s1"]["ready"], told["s1"]["wanted"]) == (0, 4)
        assert "s1" in told["s1"]["reason"]
        assert one.leases == {}
        await coordinator.pause(deadline_s=1.0)
        with pytest.raises(NotNow) as error:
            await coordinator.take_batch(0, 8, 1.0)
        assert error.value.type == "paused"


@virtual
async def test_a_step_ahead_of_the_weights_says_which_it_needs() -> None:
    """P22: the words are those of a service without shards, whatever each shard says of itself; it is not for good."""
    async with staged(trainer={"max_staleness": 1}) as (coordinator, one, other):
        one.room = other.room = 0
        await asyncio.sleep(1.0)
        for shard in (one, other):
            shard.accounts = dict.fromkeys(shard.accounts, "consumed")
        with pytest.raises(NotNow) as error:
            await coordinator.take_batch(3, 2, 5.0)
        assert (
            str(error.value) == "0 of 2 groups are ready: step 3 needs weights of version 2 or later, the fleet is at 0"
        )
        detail = error.value.detail
        assert (error.value.type, detail["step"], detail["weight_version"], detail["can_be_met"]) == (
            "not_enough",
            3,
            0,
            True,
        )
        assert (detail["max_staleness"], set(detail["shards"])) == (1, {"s0", "s1"})
        await coordinator.update_weights(2, DISK, {"deadline_s": 1.0})
        with pytest.raises(NotNow, match="s0 has 0 of 1"):
            await coordinator.take_batch(3, 2, 5.0)


@virtual
async def test_a_lease_ends_everywhere_at_once() -> None:
    """An expired lease is 409 for the whole, and its groups are back in every shard."""
    async with staged(buffer={"path": "j", "lease_s": 5.0}) as (coordinator, one, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        await asyncio.sleep(6.0)
        with pytest.raises(Conflict) as error:
            await coordinator.ack(batch["batch_id"])
        assert error.value.type == "lease_expired"
        assert one.leases == other.leases == {}
        again = await coordinator.take_batch(0, 6, 10.0, ack=[batch["batch_id"]])
        assert again["ack_expired"] == [batch["batch_id"]]
        assert set(ids(again)) == set(ids(batch))


@virtual
async def test_what_a_shard_leased_unheard_is_given_back() -> None:
    """P1: a shard that is lost in the middle of a lease owes it, and gives it back before it opens."""
    async with staged() as (coordinator, one, other):
        await until(lambda: len(one.ready) > 3 and len(other.ready) > 3)
        one.pace_s = other.pace_s = 0.5
        other.delay_s = 0.02
        taking = asyncio.ensure_future(coordinator.take_batch(0, 6, 30.0))
        await until(lambda: other.leases)
        other.die()
        batch = await taking
        assert {name.partition(":")[0] for name in ids(batch)} == {"s0"}
        other.delay_s = 0.001
        other.rise()
        await until(lambda: other.open)
        assert other.leases == {}
        await coordinator.ack(batch["batch_id"])
        assert (await coordinator.status())["ledger"]["groups"]["consumed"] == 6


@virtual
async def test_an_ack_waits_for_a_lost_shard() -> None:
    """P1: a batch stays leased while a shard with a part is lost; its ack says so, and is carried out on the return."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        other.die()
        with pytest.raises(NotNow) as error:
            await coordinator.ack(batch["batch_id"])
        assert error.value.detail["shards"] == ["s1"]
        other.rise()
        await until(lambda: other.open)
        assert (await coordinator.ack(batch["batch_id"]))["acknowledged"]
        assert sum(account == "consumed" for shard in (one, other) for account in shard.accounts.values()) == 6
        check_books(coordinator)


@virtual
async def test_a_batch_outlives_the_loss_of_a_shard() -> None:
    """P1: the part that a lost shard has is in its journal: the same step gives the same groups after its return."""
    async with staged() as (coordinator, _, other):
        batch = await coordinator.take_batch(0, 6, 10.0)
        other.die()
        other.rise()
        await until(lambda: other.open)
        assert ids(await coordinator.take_batch(0, 6, 10.0)) == ids(batch)
        await coordinator.ack(batch["batch_id"])


@virtual
async def test_without_a_journal_a_lost_part_ends_the_batch() -> None:
    """P1: what went with a shard is not acknowledged in part: 409, and the other parts go back; the books balance."""
    async with staged(journal=False) as (coordinator, one, other):
        first = await coordinator.take_batch(0, 4, 10.0)
        await coordinator.ack(first["batch_id"])
        batch = await coordinator.take_batch(1, 6, 10.0)
        await coordinator.status()
        other.die()
        other.rise()
        await until(lambda: other.open)
        with pytest.raises(Conflict):
            await coordinator.ack(batch["batch_id"])
        await until(lambda: not one.leases)
        assert (await coordinator.status())["ledger"]["groups"]["consumed"] == 4
        check_books(coordinator)


@virtual
async def test_weights_reach_all_shards_inside_a_pause() -> None:
    """P24: an update needs a pause, is confirmed by every shard, and the stage goes on with one version."""
    async with staged() as (coordinator, one, other):
        with pytest.raises(Conflict) as error:
            await coordinator.update_weights(1, DISK)
        assert error.value.type == "not_paused"
        record = await coordinator.update_weights(1, DISK, {"deadline_s": 1.0})
        assert record == {
            "version": 1,
            "workers": {name: {"ok": True, "version": 1} for name in ("s0.w0", "s1.w0")},
        }
        assert (one.version, other.version, one.open, other.open) == (1, 1, True, True)
        with pytest.raises(Conflict):
            await coordinator.update_weights(1, DISK, {})
        await coordinator.pause()
        await coordinator.update_weights(2, DISK)
        assert coordinator.state == "paused"
        assert (await coordinator.resume(weight_version=2))["weight_version"] == 2


@pytest.mark.parametrize("on_failure", ["stop", "rollback", "quarantine"])
def test_a_failed_update_leaves_one_version(on_failure: str) -> None:
    """P24: after a failure every open shard has the one version that is named, and the odd one is held and named."""

    @virtual
    async def history() -> None:
        async with staged(weights={"on_failure": on_failure}) as (coordinator, one, other):
            await coordinator.update_weights(1, DISK, {})
            other.refuses["load:2"] = Exception()
            if on_failure == "quarantine":
                record = await coordinator.update_weights(2, DISK, {})
            else:
                with pytest.raises(NotNow) as error:
                    await coordinator.update_weights(2, DISK, {})
                record = error.value.detail
                assert error.value.type == "update_failed"
                assert coordinator.state == "paused"
            assert record["workers"]["s1.w0"]["ok"] is False
            version = 1 if on_failure == "rollback" else 2
            assert record["version"] == coordinator.weights.version == version
            assert one.version == version
            if coordinator.state == "paused":
                await coordinator.resume()
            await asyncio.sleep(3.0)
            assert one.open
            assert other.open == (on_failure == "rollback")
            states = {worker["id"]: worker["state"] for worker in await coordinator.workers()}
            assert states["s0.w0"] == "ACTIVE"
            assert states["s1.w0"] == ("ACTIVE" if on_failure == "rollback" else "QUARANTINED")
            other.refuses.clear()
            await until(lambda: other.open and other.version == version)

    history()


@virtual
async def test_a_shard_that_returns_gets_the_weights_before_it_opens() -> None:
    """P24: a shard that was lost meanwhile serves nothing before it has the current weights, and nothing in a pause."""
    async with staged() as (coordinator, _one, other):
        other.die()
        record = await coordinator.update_weights(1, DISK, {"deadline_s": 0.5})
        assert record["workers"]["s0.w0"]["ok"]
        assert record["workers"]["s1.w0"]["ok"] is False
        await coordinator.pause(deadline_s=0.5)
        other.rise()
        await until(lambda: other.version == 1)
        await asyncio.sleep(3.0)
        assert not other.open
        await coordinator.resume()
        await until(lambda: other.open)
        assert other.version == 1


@virtual
async def test_weights_that_cannot_be_sent_again_keep_a_shard_out() -> None:
    """P24: after `external` a shard that returned with older weights stays held, is named, and comes with the next."""
    async with staged() as (coordinator, _one, other):
        await coordinator.update_weights(1, {"kind": "external"}, {})
        other.die()
        other.rise()
        await until(lambda: "cannot be sent again" in other_why(coordinator))
        assert not other.open
        assert "cannot be sent again" in (await coordinator.status())["shards"][1]["reason"]
        await coordinator.update_weights(2, DISK, {})
        await until(lambda: other.open and other.version == 2)


def other_why(coordinator: Coordinator) -> str:
    """Why the second shard is out of step."""
    return coordinator.members.by_id["s1"].why


@virtual
async def test_a_pushed_prompt_is_accepted_once() -> None:
    """The same id goes to the same shard, also after its loss; a lost home is said, and pushing again adds the rest."""
    async with staged(3) as (coordinator, *shards):
        prompts = [{"id": f"p{number}", "text": "x"} for number in range(30)]
        assert await coordinator.put_prompts("t", prompts) == {"accepted": 30}
        assert all(shard.pushed for shard in shards)
        shards[1].die()
        with pytest.raises(NotNow):
            await coordinator.put_prompts("t", [*prompts, *({"id": f"q{n}", "text": "x"} for n in range(30))])
        shards[1].rise()
        await until(lambda: shards[1].open)
        again = await coordinator.put_prompts("t", [{"id": f"q{n}", "text": "x"} for n in range(30)])
        assert again["accepted"] < 30
        assert sum(len(shard.pushed) for shard in shards) == 60
        with pytest.raises(BadRequest):
            await coordinator.put_prompts("t", [{"id": "r", "text": "x"}, {"id": "s"}])
        assert not any("r" in shard.pushed for shard in shards)


@virtual
async def test_an_evaluation_is_dealt_out_and_comes_back_in_order() -> None:
    """An evaluation's groups come in the order of its prompts, from all shards."""
    async with staged(3) as (coordinator, *_):
        prompts = [{"text": str(number)} for number in range(7)]
        groups = (await coordinator.evaluate("t", prompts, timeout_s=5.0))["groups"]
        assert [group["prompt"] for group in groups] == prompts
        assert {group["shard"] for group in groups} == {"s0", "s1", "s2"}


@virtual
async def test_a_call_that_waits_for_a_shard_is_told_of_the_stop() -> None:
    """P14: who waits while the service stops gets an error of the service; only who is cancelled is cancelled."""
    async with staged() as (coordinator, _, other):
        other.silent = True
        waiting = asyncio.ensure_future(coordinator.evaluate("t", [{"text": "x"}, {"text": "y"}], timeout_s=50.0))
        await asyncio.sleep(0.1)
        await coordinator.stop()
        with pytest.raises(NotNow, match="stopping"):
            await waiting


@virtual
async def test_who_is_stuck_is_named_over_all_shards() -> None:
    """Workers have names that hold over all shards, everywhere."""
    async with staged() as (coordinator, *_):
        stuck = await coordinator.stuck()
        assert {sample["worker"] for sample in stuck["samples"]} == {"s0.w0", "s1.w0"}
        assert [worker["id"] for worker in await coordinator.workers()] == ["s0.w0", "s1.w0"]
        with pytest.raises(NotFound):
            await coordinator.remove_worker("w0")


@virtual
async def test_leases_outlive_the_coordinator() -> None:
    """P31: another coordinator gives the same batch for the same step, and ends what the one before did not finish."""
    async with staged() as (coordinator, one, other):
        batch = await coordinator.take_batch(3, 6, 10.0)
        half = await coordinator.take_batch(4, 4, 10.0)
        cut = await coordinator.take_batch(5, 4, 10.0)
        assert {"s0", "s1"} == {name.partition(":")[0] for name in ids(half)} == {n.partition(":")[0] for n in ids(cut)}
        await one.call("ack", {"batch_id": half["batch_id"]})  # an ack that was cut short
        await other.give_back(cut["batch_id"])  # a lease that was never whole
        again = Coordinator(coordinator.config, [one, other])
        await again.start()
        try:
            await again.ready()
            assert ids(await again.take_batch(3, 6, 10.0)) == ids(batch)
            assert (await again.ack(half["batch_id"]))["acknowledged"]
            with pytest.raises(Conflict):
                await again.ack(cut["batch_id"])
            assert set(one.leases) == set(other.leases) == {batch["batch_id"]}
            await again.ack(batch["batch_id"])
            consumed = {name for shard in (one, other) for name, where in shard.accounts.items() if where == "consumed"}
            assert consumed == {*ids(batch), *ids(half)}
        finally:
            await again.stop()


@virtual
async def test_numbers_of_the_trainer_are_divided() -> None:
    """What the shards are told adds up to what was asked; what is wrong is refused before any of them is told."""
    async with staged(3) as (coordinator, *shards):
        for shard in shards:
            shard.told.clear()
        plan = await coordinator.set_concurrency({"train_batch_size": 64, "over_sample_threshold": 0.5}, {"s1.w0": 9})
        assert plan["workers"] == 3
        assert sum(shard.told["trainer"]["train_batch_size"] for shard in shards) == 64
        assert [shard.told["limits"] for shard in shards] == [{}, {"w0": 9}, {}]
        await coordinator.set_concurrency({"max_staleness": 2})
        assert sum(shard.told["trainer"]["train_batch_size"] for shard in shards) == 64
        with pytest.raises(BadRequest):
            await coordinator.set_concurrency({"train_batch_size": 0})
        with pytest.raises(BadRequest, match="a group for each of 3 shards"):
            await coordinator.set_concurrency({"train_batch_size": 2})
        with pytest.raises(NotFound):
            await coordinator.set_concurrency(None, {"s9.w0": 1})
