"""What a soak takes for broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollout_svc.tensors import MemoryStore
from tests.soak.account import Account, Book, Sight
from tests.soak.watched import entry
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.stage import stage


def held(ticket: int = 1, **changes: Any) -> dict[str, Any]:
    clean = {"ticket": ticket, "live": 3, "reachable": 3, "lost": 0, "made": 9, "rss": 80_000_000}
    return clean | {"bytes": 18_000_000, "blocks": 370_000, "tasks": 12} | changes


def soaked(steps: int = 300, **changes: Any) -> Account:
    """An account of steps at which nothing grew; a change may be a function of the step."""
    account = Account()
    for step in range(steps):
        now = {key: change(step) if callable(change) else change for key, change in changes.items()}
        engine, trained = now.pop("engine", 200_000_000), now.pop("trained", 50_000_000)
        account.add(Sight(held(**now), (200_000_000, engine), 300_000_000 + (step % 7) * 5_000_000, trained))
    account.close("steps")
    account.stopped(held(live=0, reachable=0))
    return account


def test_a_clean_run_is_clean() -> None:
    """Whatever grew while it warmed up; the table has every process."""
    account = soaked(rss=lambda step: 80_000_000 + min(step, 120) * 100_000)
    assert not account.broken
    assert account.table().count("flat") == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rss": lambda step: 80_000_000 + 40_000 * step}, "service grows in steps by 40000 bytes a step"),
        ({"engine": lambda step: 200_000_000 + 20_000 * step}, "engine-1 grows"),
        ({"trained": lambda step: 50_000_000 + 20_000 * step}, "trainer, in use grows"),
        ({"bytes": lambda step: 18_000_000 + 5_000 * step}, "service, in use grows in steps by 5000 bytes a step"),
        ({"blocks": lambda step: 370_000 + 50 * step}, "blocks in the service grow in steps: 50.0 a step"),
        ({"tasks": lambda step: 12 + step // 5}, "tasks of the service grow"),
        ({"live": lambda step: 3 + (step == 200)}, "4 of which 3 (after 201 "),
        ({"live": 2}, "live handles are not the reachable ones"),
        ({"lost": lambda step: step // 299}, "forgotten: 1"),
        ({"live": 0, "reachable": 0}, "no step had a handle"),
    ],
)
def test_what_does_not_hold_is_named_once(changes: dict[str, Any], words: str) -> None:
    """With the step at which it was seen."""
    account = soaked(**changes)
    assert len(account.broken) == 1
    assert words in account.table()


@pytest.mark.parametrize("last", [None, held(live=1, reachable=0), held(live=0, lost=1)])
def test_what_is_left_at_the_end_is_named(last: dict[str, Any] | None) -> None:
    """Alive, forgotten, or nobody knows."""
    account = Account()
    account.stopped(last)
    assert account.broken


def test_the_book_is_read_while_it_is_written(tmp_path: Path) -> None:
    """Half a line is none; the last one is known by its missing ticket."""
    book = Book(tmp_path / "book")
    assert book.last() is None
    first, second = orjson.dumps(held(1)) + b"\n", orjson.dumps(held(2, live=5)) + b"\n"
    book.path.write_bytes(first + second[:7])
    assert book.of(1)["live"] == 3
    with book.path.open("ab") as file:
        file.write(second[7:] + orjson.dumps(held(live=0) | {"ticket": None}) + b"\n")
    assert book.of(2)["live"] == 5
    last = book.last()
    assert last is not None
    assert last["live"] == 0


async def test_only_what_a_sample_owns_is_reachable() -> None:
    """A handle that somebody else keeps is alive all the same: that is how a leak shows."""
    async with FakeSGLang(weight_version="0") as engine, stage(engine, pushed=1) as made:
        engine.answer = lambda call: Reply(tokens=[call.prompt_ids[-1]])
        await made.until(lambda: made.groups("ready") == 1)
        (sample,) = (sample for group in made.live_groups() for sample in group.samples)
        handles = made.parts.handles

        def hold() -> Any:
            return handles.hold(MemoryStore().put(np.zeros(3)), kind="experts", holder=sample.sample_id)

        sample.experts = hold()
        assert (entry(made.parts, 1)["live"], entry(made.parts, 1)["reachable"]) == (1, 1)
        kept = hold()
        assert (entry(made.parts, 1)["live"], entry(made.parts, 1)["reachable"]) == (2, 1)
        kept.release("the test")
        batch = await made.take()
        await made.service.ack(batch["batch_id"])
        assert (entry(made.parts, 1)["live"], entry(made.parts, 1)["reachable"]) == (0, 0)
