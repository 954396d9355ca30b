"""The replay buffer: each group in one place, leases that end once, and old work first."""

from math import inf

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_svc.buffer.replay import ReplayBuffer
from rollout_svc.buffer.storage import MemoryStorage
from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from tests.support.counting import operations
from tests.support.groups import completed, make_group, recount, segment

MAX_BYTES = 2000
"""A few groups."""


class BufferMoves(RuleBasedStateMachine):
    """A buffer beside plain lists of what must be in it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.buffer = ReplayBuffer(MAX_BYTES)
        self.told = 0
        self.expected = 0
        self.buffer.subscribe(self.count)
        self.made: list[Group] = []
        self.ready: list[str] = []
        self.unfinished: list[tuple[str, float]] = []
        self.version: dict[str, float] = {}
        self.leases: dict[str, tuple[list[str], float]] = {}
        self.ended: dict[str, str] = {}
        self.now = 0.0

    def count(self) -> None:
        self.told += 1

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def bytes_are_counted(self) -> None:
        """Of ready and of leased groups, exactly; those that left are not counted."""
        ready = sum(group.payload_bytes for group in self.buffer.ready_groups())
        leased = sum(group.payload_bytes for lease in self.buffer.leases for group in lease.groups)
        assert (self.buffer.ready_bytes, self.buffer.leased_bytes) == (ready, leased)
        held = [*self.buffer.ready_groups(), *(group for lease in self.buffer.leases for group in lease.groups)]
        assert self.buffer.heavy_bytes == sum(group.heavy_bytes for group in held)
        assert self.buffer.bytes == ready + leased
        assert self.buffer.full == (ready + leased >= MAX_BYTES)

    @rule(size=st.integers(1, 3))
    def finished(self, size: int) -> None:
        group = completed(self.ledger, f"g{len(self.made)}", size)
        self.made.append(group)
        self.buffer.put_ready(group)
        self.ready.append(group.group_id)
        self.expected += 1

    @rule(rest=st.floats(-3, 6), version=st.none() | st.integers(0, 3))
    def handed_back(self, rest: float, version: int | None) -> None:
        """With a token of that version, or none at all."""
        group = make_group(self.ledger, group_id=f"g{len(self.made)}")
        self.made.append(group)
        self.version[group.group_id] = inf if version is None else version
        group.start()
        attempt = group.samples[0].hand_out()
        if version is not None:
            group.samples[0].extend(attempt, segment([7], version))
        group.hand_back(self.now + rest)
        self.buffer.put_back(group)
        self.unfinished.append((group.group_id, self.now + rest))
        self.expected += 1

    @rule()
    def go_on(self) -> None:
        """The one with the oldest token, of those whose rest is over; of equals the one that came first."""
        due = [group_id for group_id, not_before in self.unfinished if not_before <= self.now]
        due.sort(key=self.version.__getitem__)
        group = self.buffer.next_unfinished(self.now)
        assert (group.group_id if group else None) == (due[0] if due else None)
        if group is not None:
            self.unfinished = [entry for entry in self.unfinished if entry[0] != group.group_id]
            group.start()
            group.settle("failed", "test")

    @precondition(lambda self: self.ready)
    @rule(number=st.integers(1, 3), lease_s=st.floats(0, 6))
    def lease(self, number: int, lease_s: float) -> None:
        batch_id, step = f"b{len(self.leases) + len(self.ended)}", len(self.ended) + len(self.leases)
        groups = list(self.buffer.ready_groups())[:number]
        lease = self.buffer.lease(batch_id, step, groups, self.now + lease_s)
        assert self.buffer.leased_at(step) is lease
        self.leases[batch_id] = (self.ready[:number], self.now + lease_s)
        self.ready = self.ready[number:]

    @rule(number=st.integers(0, 12))
    def acknowledge(self, number: int) -> None:
        """An ack consumes exactly once; a second one, or one that is late, finds no lease."""
        batch_id = f"b{number}"
        lease = self.buffer.acknowledge(batch_id)
        assert (lease is not None) == (batch_id in self.leases)
        if lease is not None:
            assert [group.group_id for group in lease.groups] == self.leases.pop(batch_id)[0]
            assert all(group.account == "consumed" for group in lease.groups)
            self.ended[batch_id] = "acknowledged"
            self.expected += 1

    @rule()
    def expire(self) -> None:
        """What was lent first is in front again, each batch in its own order, before all that was never lent."""
        over = [batch_id for batch_id, (_, until) in self.leases.items() if until <= self.now]
        assert [lease.batch_id for lease in self.buffer.expire_leases(self.now)] == over
        back = [group_id for batch_id in over for group_id in self.leases.pop(batch_id)[0]]
        self.ready = back + self.ready
        self.ended |= dict.fromkeys(over, "expired")
        self.expected += bool(over)

    @precondition(lambda self: self.ready)
    @rule(number=st.integers(0, 5))
    def drop(self, number: int) -> None:
        group_id = self.ready.pop(number % len(self.ready))
        group = next(group for group in self.made if group.group_id == group_id)
        self.buffer.drop_ready(group)
        group.settle("expired", "stale")

    @invariant()
    def holds_what_it_must(self) -> None:
        buffer = self.buffer
        assert [group.group_id for group in buffer.ready_groups()] == self.ready
        assert (buffer.ready, buffer.unfinished) == (len(self.ready), len(self.unfinished))
        assert buffer.due(self.now) is any(rest <= self.now for _, rest in self.unfinished)
        assert buffer.rests_until() == min((rest for _, rest in self.unfinished if rest > self.now), default=None)
        held = {lease.batch_id: [group.group_id for group in lease.groups] for lease in buffer.leases}
        assert held == {batch_id: groups for batch_id, (groups, _) in self.leases.items()}
        assert {batch_id: buffer.fate(batch_id) for batch_id in self.ended} == self.ended
        assert all(buffer.fate(batch_id) is None for batch_id in self.leases)
        assert self.told == self.expected

    @invariant()
    def agrees_with_the_ledger(self) -> None:
        """What the buffer holds is what the ledger says nobody owns."""  # P1
        self.ledger.check()
        told = self.ledger.as_json()
        assert {unit: told[unit] for unit in ("groups", "samples")} == recount(self.made)
        assert self.ledger.groups("ready") == self.buffer.ready
        assert self.ledger.groups("aborted") == self.buffer.unfinished
        assert self.ledger.groups("leased") == sum(len(lease.groups) for lease in self.buffer.leases)


TestBufferMoves = BufferMoves.TestCase
TestBufferMoves.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_an_ack_after_the_lease_ended_consumes_nothing() -> None:
    """The groups of an expired lease are the next trainer's; the late ack is told what became of its batch."""
    ledger, buffer = Ledger(), ReplayBuffer()
    group = completed(ledger, "g")
    buffer.put_ready(group)
    buffer.lease("b", 0, [group], 5.0)
    assert buffer.expire_leases(4.9) == []
    assert len(buffer.expire_leases(5.0)) == 1
    assert buffer.acknowledge("b") is None
    assert (buffer.fate("b"), group.account, buffer.leased_at(0)) == ("expired", "ready", None)


def test_the_fate_of_old_leases_is_forgotten_at_last() -> None:
    """What is remembered of ended leases does not grow with the number of steps."""  # P30
    ledger, buffer = Ledger(), ReplayBuffer()
    for step in range(1100):
        group = completed(ledger, f"g{step}")
        buffer.put_ready(group)
        buffer.lease(f"b{step}", step, [group], 5.0)
        buffer.acknowledge(f"b{step}")
    assert (buffer.fate("b0"), buffer.fate("b1099")) == (None, "acknowledged")
    assert len(buffer._ended) == 1024


async def test_memory_storage_promises_nothing_at_once() -> None:
    """Without a journal a put is no wait at all, and closing is idempotent."""
    storage = MemoryStorage()
    await storage.save(completed(Ledger(), "g"))
    await storage.close()
    await storage.close()


def test_a_group_that_is_not_ready_is_not_lent() -> None:
    """Leasing what the buffer does not have ready is an error."""
    ledger, buffer = Ledger(), ReplayBuffer()
    with pytest.raises(KeyError):
        buffer.lease("b", 0, [completed(ledger, "g")], 5.0)
    assert (buffer.leases, ledger.groups("leased")) == ((), 0)


def test_what_rests_costs_those_that_come_back_nothing() -> None:
    """A thousand groups that rest, or a hundred: one that comes back and is asked for costs the same."""

    def cost(resting: int) -> int:
        buffer, ledger = ReplayBuffer(), Ledger()
        for number in range(resting):
            buffer.put_back(_back(ledger, f"r{number}", 100.0 + number % 7))

        def use() -> None:
            for number in range(20):
                buffer.put_back(_back(ledger, f"g{number}", 0.0))
                assert buffer.due(1.0)
                assert buffer.rests_until() == 100.0
                assert buffer.next_unfinished(1.0) is not None

        return operations(use)

    assert cost(1000) < 1.1 * cost(100)


def _back(ledger: Ledger, group_id: str, not_before: float) -> Group:
    group = make_group(ledger, 1, group_id)
    group.start()
    group.hand_back(not_before)
    return group
