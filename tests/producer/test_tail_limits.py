"""The tail keeps to the tasks' own limits: who has none left is passed over, and comes with a later round."""

from __future__ import annotations

from rollout_svc.group import Group
from rollout_svc.ledger import Ledger
from rollout_svc.producer.tail import Tail
from rollout_svc.prompt import Prompt


def expired(tail: Tail, number: int, task: str) -> Prompt:
    """Gather the prompt of a group that expired."""
    prompt = Prompt(prompt_id=f"p{number}", task=task, input_ids=[number])
    group = Group(group_id=f"g{number}", prompt=prompt, size=1, lane="train", ledger=Ledger())
    assert tail.again(group)
    return prompt


def begin(tail: Tail) -> Prompt | Group | None:
    """Begin a round, and say what is first in it."""
    tail.begin()
    return tail.peek()


def test_a_prompt_without_room_does_not_make_a_round() -> None:
    """Two of a task at its limit and one of another: two rounds' worth are here, and one can begin."""  # P33
    tail = Tail(1, 2)
    tail.barred = lambda task: task == "full"
    begun, full = [], expired(tail, 0, "full")
    begun.append((tail.counts.ripe, begin(tail)))
    free = expired(tail, 1, "free")
    begun.append((tail.counts.ripe, begin(tail)))
    assert begun == [(False, None), (True, free)]
    tail.barred = lambda _: False
    assert tail.prompts() == [free, full]


def test_a_prompt_that_lost_its_room_meanwhile_waits_for_a_later_round() -> None:
    """It is deferred: the round goes on with the others, and ends without it."""  # P33
    tail = Tail(2, 2)
    first, second = expired(tail, 0, "a"), expired(tail, 1, "a")
    tail.begin()
    assert tail.peek() is first
    tail.defer()
    assert tail.peek() is second
    group = Group(group_id="g", prompt=second, size=1, lane="train", ledger=Ledger())
    tail.started(group)
    assert tail.prompts() == [first]
    assert tail.ended("g")
    assert not tail.counts.on
