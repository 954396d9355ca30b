"""P29: the end of a step with real processes: owners, consumers of several roles, failures, a death and a return."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from rollout_svc.errors import DrainFailed
from rollout_svc.tensors.clearing import Cleared, Consumer, SyncController
from rollout_svc.tensors.rtensor import localize
from rollout_svc.tensors.shards import FetchBuffer, Fetcher, Plane
from tests.support.shard_processes import ShardProcess

Rank = tuple[int, ...]
RANKS: tuple[Rank, ...] = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass
class House:
    """A controller with all its processes."""

    controller: SyncController
    fetcher: Fetcher
    owners: list[ShardProcess]
    consumers: dict[tuple[str, Rank], ShardProcess]
    dead: set[str] = field(default_factory=set)
    rss: dict[str, list[float]] = field(default_factory=dict)

    @property
    def alive(self) -> list[ShardProcess]:
        """Owners and consumers, but for those that were killed."""
        return [one for one in (*self.owners, *self.consumers.values()) if one.address not in self.dead]

    def batch(self, step: int, count: int, size: int) -> list[object]:
        """Have the owners make a batch and everybody fetch all of it, the controller as well."""
        made = [owner.ask("make", step, count, size) for owner in self.owners]
        tree = [answer() for answer in made]
        answers = [process.ask("use", tree) for process in self.alive]
        mean = sum(float(tensor.mean()) for part in localize(tree, self.fetcher) for tensor in part["tensors"])
        assert [answer() for answer in answers] == [mean] * len(answers)
        return tree

    def measure(self) -> None:
        """Note how much memory each process has."""
        asked = {process.address: process.ask("rss") for process in self.alive}
        for address, answer in asked.items():
            self.rss.setdefault(address, []).append(answer())

    def kill(self, role: str, rank: Rank) -> str:
        """Kill a consumer; returns its address."""
        process = self.consumers[role, rank]
        process.kill()
        self.dead.add(process.address)
        return process.address

    def again(self, role: str, rank: Rank) -> None:
        """Start a consumer that was killed once more, at its old address."""
        back = ShardProcess(port=self.consumers[role, rank].port)
        self.consumers[role, rank] = back
        self.dead.discard(back.address)
        self.controller.register(role, [Consumer(back.address, rank, back.incarnation)])


@contextmanager
def house(roles: tuple[str, ...], owners: int) -> Iterator[House]:
    """Start everything; nothing is left of it afterwards."""
    with ExitStack() as stack:
        them = [ShardProcess(owns=True) for _ in range(owners)]
        consumers = {(role, rank): ShardProcess() for role in roles for rank in RANKS}
        fetcher = Fetcher(FetchBuffer())
        controller = stack.enter_context(SyncController(Plane(buffer=fetcher.buffer), deadline_s=6.0))
        for role in roles:
            ranks = [(rank, consumers[role, rank]) for rank in RANKS]
            controller.register(role, [Consumer(one.address, rank, one.incarnation) for rank, one in ranks])
        controller.register("rollout", [owner.address for owner in them])  # owners that consume as well
        built = House(controller, fetcher, them, consumers)
        try:
            yield built
        finally:
            for process in (*built.owners, *built.consumers.values()):
                process.close()
            fetcher.client.close()


def assert_owed(cleared: Cleared, dead: str, ids: int) -> None:
    """Nothing is left but in the process that died, which is named."""
    assert [(one.process, len(one.ids)) for one in cleared.kept] == [(dead, ids)]
    assert cleared.statistics.silent == (dead,)
    assert (cleared.entries, cleared.bytes, cleared.leaks) == (0, 0, ())


def run(built: House, steps: int, count: int, size: int, *, hang: bool = False) -> None:
    """Steps of which one meets an owner that fails deletes, and later ones a consumer that dies and returns.

    Args:
        built: with whom.
        steps: at least 9.
        count: tensors of each owner in a step.
        size: of a tensor, in bytes.
        hang: whether one of the steps meets a consumer that answers nothing: it takes as long as the deadline.
    """
    failing, dying = steps // 3, 2 * steps // 3
    role, rank = next(reversed(built.consumers))
    owner = built.owners[0]
    in_a_step = len(built.owners) * count
    for step in range(steps):
        if step == dying + 2:
            built.again(role, rank)
        tree = built.batch(step, count, size)
        if step == failing:
            owner.ask("fail", True)()
            cleared = built.controller.clear_batches(tree)
            assert [(one.process, one.verb) for one in cleared.kept] == [(owner.address, "drop")]
            assert (cleared.entries, cleared.bytes) == (count, count * size), (
                "those of the failed delete, and no others"
            )
            owner.ask("fail", False)()
        elif hang and step == steps // 2:
            stopped = next(iter(built.consumers.values()))
            stopped.stop()
            assert_owed(built.controller.clear_batches(tree), stopped.address, in_a_step)
            stopped.go_on()
        elif step == dying:
            dead = built.kill(role, rank)
            assert_owed(built.controller.clear_batches(tree), dead, in_a_step)
        elif step == dying + 1:
            with pytest.raises(DrainFailed, match=f"{dead} did not drain {in_a_step} ids") as failed:
                built.controller.clear_batches(tree)
            assert_owed(failed.value.cleared, dead, in_a_step)
        else:
            cleared = built.controller.clear_batches(tree)
            assert cleared.ids == in_a_step
            assert (cleared.kept, cleared.given_up, cleared.statistics.silent) == ((), (), ())
            assert (cleared.entries, cleared.bytes, cleared.leaks) == (0, 0, ())
        assert built.fetcher.buffer.stats().entries == 0
        if not built.dead:
            built.measure()


def test_a_step_ends_with_nothing_left_in_any_process() -> None:
    """P29: 30 steps of an owner that consumes and two roles of four ranks; the failed delete is done a step later."""
    with house(("actor", "reference"), 1) as built:
        run(built, 30, 4, 32 * 1024)
