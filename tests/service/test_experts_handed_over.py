"""Routed experts from the buffer to a trainer, and over the end of a service: owned once, read while they are lent."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_svc import recovery
from rollout_svc.buffer.journal import Journal
from rollout_svc.buffer.journal.fingerprint import fingerprint_of
from rollout_svc.buffer.recovered import FoundGroup, Position
from rollout_svc.errors import ConfigError, NotFound, SpentHandle
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.sample.state import SampleState
from rollout_svc.service import RolloutService
from rollout_svc.tensors import Handles, MemoryStore, Stored, Tally
from rollout_svc.tensors.shared import SharedStore
from rollout_svc.trajectories.record import entry_of
from tests.service.test_recovery import Disk
from tests.support.groups import make_prompt, segment
from tests.support.routed import LAYERS, TOP_K, own, ready_group, routing
from tests.support.stage import Stage, make_config, stage


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A journal of this test's own."""
    return Disk(tmp_path)


async def fill(made: Stage, *group_ids: str, routed: bool = True) -> list[Group]:
    """Put groups into the buffer as if they had been generated with routed experts."""
    groups = []
    for number, group_id in enumerate(group_ids):
        prompt = make_prompt(prompt_id=f"p{number}")
        group = ready_group(made.parts.ledger, made.parts.handles, group_id, prompt=prompt, routed=routed)
        made.parts.storage.admitted(group, Position(number + 1))
        await made.parts.storage.save(group)
        made.parts.buffer.put_ready(group)
        groups.append(group)
    return groups


def held(made: Stage) -> int:
    """Live handles of routed experts."""
    return made.parts.handles.live.get("experts", Tally(0, 0)).handles


async def test_a_trainer_reads_them_until_its_ack() -> None:
    """By sample, as arrays nobody can write to; after the ack the handle says so, and what was read stays."""  # P27
    async with stage(ready=False) as made:
        await fill(made, "a", "b")
        batch = await made.service.lease_batch(0, 2, 5.0)
        experts, again = batch.take_experts(), batch.take_experts()
        assert list(experts) == ["a.0", "a.1", "b.0", "b.1"] == list(again)
        assert experts["a.0"] is not again["a.0"]
        read = experts["b.1"].read()
        assert read.shape == (3 + 5 - 1, LAYERS, TOP_K)
        assert experts["b.1"].nbytes == read.nbytes
        assert np.array_equal(read, routing("b.1", 7))
        with pytest.raises(ValueError, match="read-only"):
            read[0] = 1
        assert held(made) == 4
        await made.service.ack(batch.batch_id)
        assert held(made) == 0
        for handle in (experts["b.1"], again["a.0"]):
            with pytest.raises(SpentHandle, match=f"after the ack of batch {batch.batch_id}"):
                handle.read()
        assert np.array_equal(read, routing("b.1", 7))


async def test_a_lease_that_ends_takes_them_back() -> None:
    """The group is ready again with its experts, for the next lease; the old handle says what ended it."""  # P27
    async with stage(ready=False, buffer={"lease_s": 0.05}) as made:
        await fill(made, "a")
        first = await made.service.lease_batch(0, 1, 5.0)
        experts = first.take_experts()
        await made.until(lambda: made.groups("ready") == 1)
        with pytest.raises(SpentHandle, match=f"after the lease of batch {first.batch_id} ended"):
            experts["a.0"].read()
        made.parts.batches._lease_s = 60.0
        second = await made.service.lease_batch(1, 1, 5.0)
        assert second.batch_id != first.batch_id
        assert np.array_equal(second.take_experts()["a.0"].read(), routing("a.0", 6))
        with pytest.raises(SpentHandle, match="ended"):
            experts["a.0"].read()
        assert held(made) == 2
        await made.service.ack(second.batch_id)


async def test_the_same_step_again_reads_the_same_loan() -> None:
    """A second take of a step has handles of its own, which end with the same ack."""
    async with stage(ready=False) as made:
        await fill(made, "a")
        one = (await made.service.lease_batch(0, 1, 5.0)).take_experts()
        two = (await made.service.lease_batch(0, 1, 5.0)).take_experts()
        assert one["a.0"].read() is not None
        await made.service.ack(made.parts.buffer.leases[0].batch_id)
        for handles in (one, two):
            with pytest.raises(SpentHandle, match="the ack of batch"):
                handles["a.0"].read()


async def test_what_was_acknowledged_has_not_none_but_is_refused() -> None:
    """A trainer that asks too late is told so: an empty answer would be taken for samples without routing."""  # P27
    async with stage(ready=False) as made:
        await fill(made, "a", "b")
        first = await made.service.lease_batch(0, 1, 5.0)
        await made.service.ack(first.batch_id)
        second = await made.service.lease_batch(1, 1, 5.0)
        made.parts.batches._forget(made.parts.buffer.expire_leases(float("inf"))[0])
        for batch, why in ((first, "the ack of batch"), (second, "the lease of batch")):
            with pytest.raises(SpentHandle, match=why):
                batch.take_experts()


async def test_samples_without_have_no_handle() -> None:
    """Where none were asked for there is nothing to take; records say nothing of them either way."""
    async with stage(ready=False) as made:
        await fill(made, "a", routed=False)
        await fill(made, "b")
        batch = await made.service.lease_batch(0, 2, 5.0)
        assert list(batch.take_experts()) == ["b.0", "b.1"]
        without, routed = (group["samples"][0] for group in batch.as_json()["groups"])
        assert without.keys() == routed.keys()
        assert "experts" not in str(batch.head())
        assert made.parts.batches.experts_of("b.0").read().shape == (6, LAYERS, TOP_K)
        for sample_id, kind in (("a.0", "no_experts"), ("b.9", "not_found"), ("nobody", "not_found")):
            with pytest.raises(NotFound) as refused:
                made.parts.batches.experts_of(sample_id)
            assert refused.value.type == kind
        await made.service.ack(batch.batch_id)
        with pytest.raises(NotFound, match="no batch that is lent"):
            made.parts.batches.experts_of("b.0")


async def test_a_read_handle_owns_nothing() -> None:
    """It cannot end what it reads: no way to release or take, and a forgotten one frees nothing."""  # P27
    async with stage(ready=False) as made:
        await fill(made, "a")
        batch = await made.service.lease_batch(0, 1, 5.0)
        assert not {"release", "take"} & set(dir(batch.take_experts()["a.0"]))
        del batch
        assert held(made) == 2
        assert not made.parts.handles.lost
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(made.parts.batches.experts_of("a.0"))
        await made.service.ack(made.parts.buffer.leases[0].batch_id)


async def test_a_restart_has_them_again(disk: Disk) -> None:
    """Ready, leased and unfinished groups have their experts in the next life, each owned once."""  # P27 P31
    async with stage(ready=False, buffer=disk()) as made:
        groups = await fill(made, "a", "b")
        batch = await made.service.lease_batch(0, 1, 5.0)
        half = Group(group_id="c", prompt=make_prompt(prompt_id="p9"), size=1, lane="train", ledger=made.parts.ledger)
        made.parts.storage.admitted(half, Position(3))
        half.start()
        attempt = half.samples[0].hand_out()
        half.samples[0].extend(attempt, segment([1, 2, 3]), own(made.parts.handles, routing("c.0", 4)))
        half.hand_back()
        made.parts.storage.handed_back(half)
        made.parts.buffer.put_back(half)
        groups.append(half)
        await disk.dies(made)
        for group in groups:
            for sample in group.samples:
                assert sample.experts is not None
                sample.experts.release("this life")
    async with stage(ready=False, buffer=disk()) as made:
        assert held(made) == 5
        found = {sample.sample_id: sample for group in made.live_groups() for sample in group.samples}
        for sample_id, rows in {"a.0": 6, "a.1": 7, "b.0": 6, "b.1": 7, "c.0": 4}.items():
            owned = found[sample_id].experts
            assert owned is not None
            read = owned.read()
            assert not read.flags.writeable
            assert np.array_equal(read, routing(sample_id, rows))
        again = await made.service.lease_batch(0, 1, 5.0)
        assert again.batch_id == batch.batch_id
        assert np.array_equal(again.take_experts()["a.0"].read(), routing("a.0", 6))
        await made.service.ack(again.batch_id)
        assert held(made) == 3
        journal = made.parts.storage
        assert isinstance(journal, Journal)
        await journal.flush()
        left = await journal.writer.run(
            lambda connection: connection.execute("SELECT DISTINCT group_id FROM experts ORDER BY 1").fetchall()
        )
        assert left == [("b",), ("c",)]


class Full:
    """A store without room."""

    name = "full"

    def put(self, tensor: Any) -> Stored:
        """Refuse it."""
        raise OSError("no room")

    def close(self) -> None:
        """Do nothing."""


def segments(folder: Path) -> int:
    """Files in a folder."""
    return len(list(folder.iterdir()))


async def test_recovered_experts_lie_where_this_life_keeps_them(tmp_path: Path) -> None:
    """In shared memory where that is the store, in memory where it has no room: none is lost at a start."""  # P31
    states = (SampleState(), SampleState(status="ABORTED", experts=routing("g.1", 4)))
    found = FoundGroup("g", make_prompt(), "aborted", 0, 0, states)
    async with stage(ready=False) as made:
        for store, files in ((SharedStore(tmp_path), 1), (Full(), 0), (MemoryStore(), 0)):
            [(index, handle)] = (await recovery._experts(found, made.parts, store)).items()
            assert index == 1
            assert segments(tmp_path) == files
            assert np.array_equal(handle.read(), routing("g.1", 4))
            handle.release("the test")
            assert segments(tmp_path) == 0


def test_nothing_that_is_stored_of_a_sample_tells_its_experts() -> None:
    """A trajectory is the same with experts as without."""  # P28
    ledger, handles = Ledger(), Handles()
    groups = [ready_group(ledger, handles, "g", routed=routed) for routed in (True, False)]
    assert handles.live["experts"].handles == 2
    routed, plain = (entry_of(group, now=1.0, wall=1000.0) for group in groups)
    assert routed == plain


async def test_a_store_that_cannot_be_had_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray, or with whatever else it says: nothing is left open, and the journal may be opened again."""  # P35
    config = make_config(buffer={"path": str(tmp_path / "j.db")}, experts={"enabled": True, "store": "ray"})
    monkeypatch.setitem(sys.modules, "ray", None)
    service = RolloutService(config)
    with pytest.raises(ConfigError, match=r"experts\.store: ray: ConnectionError: Ray is not installed"):
        await service.start()
    Journal.open(tmp_path / "j.db", fingerprint_of(config, {}), keep_steps=64)._connection.close()
