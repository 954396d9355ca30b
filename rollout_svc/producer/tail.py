"""The tail: what expired, or was aborted again and again, gathers here until it goes first.

A group that expired is settled, and its prompt waits to be admitted once more; a group that pauses cut `after_aborts`
times is kept with its tokens and leaves the ordinary queue. When `size` have gathered a round begins: they are started
before everything else, and until the last of them has finished no more is out than the next batch needs. So that batch
needs each of them, the trainer waits for it, and no update can come in between (source of the idea: RollPacker).

Invariants:

- Whatever is here is here once: gathered, or left of the round that is on, or under way in it.
- A round ends when each of its groups has finished or was settled; one that was cut meanwhile still belongs to it.
- Groups are gathered between rounds only, and go before prompts: what holds room is never left behind.
- A task all of whose groups wait here, and that may have no more (`stranded`), waits for no company: nobody else of it
  can come.
- A prompt whose task has as many groups as it may (`barred`) is passed over, and takes part in a later round.
- Nothing here waits, and nothing is gathered while `size` is None.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rollout_svc.group import Group
from rollout_svc.producer.schedule import TailCounts
from rollout_svc.prompt import Prompt

__all__ = ["Tail"]


class Tail:
    """What gathered, and the round that is on; see the module's invariants."""

    __slots__ = ("_gathered", "_groups", "_left", "_under_way", "after_aborts", "barred", "size", "stranded")

    def __init__(self, size: int | None, after_aborts: int) -> None:
        """Make an empty one.

        Args:
            size: how many make a round; None: there is no tail.
            after_aborts: pauses that have to cut a group before it is kept here, at least 1.
        """
        self.size = size
        self.after_aborts = after_aborts
        self.barred: Callable[[str], bool] = lambda _: False
        self.stranded: Callable[[str], bool] = lambda _: False
        self._gathered: deque[Prompt | Group] = deque()
        self._left: deque[Prompt | Group] = deque()
        self._under_way: set[str] = set()
        self._groups = 0  # of `_gathered` and `_left`

    def __repr__(self) -> str:
        return f"<Tail gathered={len(self._gathered)} left={len(self._left)} under_way={len(self._under_way)}>"

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def waiting_groups(self) -> int:
        """Groups that wait here, admitted and not under way."""
        return self._groups

    @property
    def waiting_prompts(self) -> int:
        """Prompts that wait here to be admitted once more."""
        return len(self._gathered) + len(self._left) - self._groups

    @property
    def counts(self) -> TailCounts:
        """What the schedule has to know."""
        groups = [entry for entry in self._gathered if isinstance(entry, Group)] if self._groups else []
        whole = self.size is not None and len(self._gathered) >= self.size and len(self._free()) >= self.size
        return TailCounts(
            on=bool(self._left or self._under_way),
            left=len(self._left),
            kept=bool(self._left) and isinstance(self._left[0], Group),
            ripe=whole or any(self.stranded(task) for task in {group.prompt.task for group in groups}),
            gathered=len(self._gathered),
            gathered_groups=len(groups),
        )

    def _free(self) -> list[Prompt | Group]:
        """What gathered and could be started, in order."""
        return [entry for entry in self._gathered if isinstance(entry, Group) or not self.barred(entry.task)]

    def groups(self) -> list[Group]:
        """The groups that wait here."""
        return [entry for entry in (*self._left, *self._gathered) if isinstance(entry, Group)]

    def held_back(self, task: str) -> int:
        """How many of those are of this task."""
        return sum(group.prompt.task == task for group in self.groups()) if self._groups else 0

    def prompts(self) -> list[Prompt]:
        """The prompts that wait here, in the order they will be admitted."""
        return [entry for entry in (*self._left, *self._gathered) if isinstance(entry, Prompt)]

    def wants(self, group: Group) -> bool:
        """Whether an unfinished group belongs here rather than in the ordinary queue: while a round is on none does."""
        return self.size is not None and group.cuts >= self.after_aborts and not (self._left or self._under_way)

    # -- gathering -------------------------------------------------------------------------------------------

    def keep(self, group: Group) -> None:
        """Gather an unfinished group with its tokens."""
        self._gathered.append(group)
        self._groups += 1

    def again(self, group: Group) -> bool:
        """A group expired: whether its prompt is gathered, to be admitted once more."""
        if self.size is None:
            return False
        self._gathered.append(group.prompt)
        return True

    def restore(self, prompts: Iterable[Prompt]) -> None:
        """Gather prompts that waited here before a restart."""
        self._gathered.extend(prompts)

    def drop(self, group: Group) -> None:
        """Let go of a group that waits here; the caller settles it."""
        for entries in (self._left, self._gathered):
            if group in entries:
                entries.remove(group)
                self._groups -= 1
                return

    # -- a round ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a round with what gathered, at most `size`, groups first; nothing, while one is on or nothing is here.

        Groups hold room that prompts have to wait for, so all of them go along: there are never more than `size`.
        """
        if self._left or self._under_way or self.size is None:
            return
        ordered = sorted(self._free(), key=lambda entry: isinstance(entry, Prompt))[: self.size]
        self._left = deque(ordered)
        taken = set(map(id, ordered))
        self._gathered = deque(entry for entry in self._gathered if id(entry) not in taken)

    def peek(self) -> Prompt | Group | None:
        """The next of the round to be started; None when all are."""
        return self._left[0] if self._left else None

    def defer(self) -> None:
        """What `peek` showed cannot be started in this round: it gathers for a later one."""
        self._gathered.append(self._left.popleft())

    def started(self, group: Group) -> None:
        """What `peek` showed is under way, as this group."""
        if isinstance(self._left.popleft(), Group):
            self._groups -= 1
        self._under_way.add(group.group_id)

    def ended(self, group_id: str) -> bool:
        """A group finished or was settled; returns whether that ended the round."""
        if group_id not in self._under_way:
            return False
        self._under_way.discard(group_id)
        return not (self._left or self._under_way)
