"""Sources go on where they were: restored to any position, a source gives exactly the rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.buffer.storage import Position
from rollout_svc.config import PromptsConfig
from rollout_svc.errors import ConfigError
from rollout_svc.producer.reading import AHEAD
from rollout_svc.producer.sources import IteratorSource, JsonlSource, PromptSource, PushSource, make_source
from tests.support.bell import WAIT_S

MODULE = "tests.producer.test_restore"


async def used(source: PromptSource, count: int | None = None) -> list[str]:
    """Use up so many lines, or all that are left, and say which; a problem stands for its line."""
    woken = asyncio.Event()
    source.open(woken.set)
    found: list[str] = []
    async with asyncio.timeout(WAIT_S):
        while count is None or len(found) < count:
            line = source.peek()
            if line is not None:
                source.advance()
                found.append(line.prompt_id)
            elif source.exhausted or isinstance(source, PushSource):
                break
            else:
                await woken.wait()
                woken.clear()
    source.close()
    return found


def told(source: PromptSource) -> Position:
    """A position as it comes back from where it was written: only JSON survives."""
    position = source.position
    assert position is not None
    return Position(position.used, orjson.loads(orjson.dumps(position.state)))


# -- files ---------------------------------------------------------------------------------------------------


def a_file(folder: str | Path, size: int) -> Path:
    """Write so many prompts."""
    path = Path(folder) / "p.jsonl"
    path.write_bytes(b"".join(b'{"id": "p%d", "input_ids": [%d]}\n' % (n, n) for n in range(size)))
    return path


def jsonl(path: Path, **order: Any) -> JsonlSource:
    return JsonlSource(path, PromptsConfig(jsonl=str(path), **order), refused={}, where="s")


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 90),
    epochs=st.integers(1, 4),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    share=st.floats(0, 1),
)
def test_a_file_goes_on_at_any_cut(size: int, epochs: int, shuffle: bool, seed: int, share: float) -> None:
    """P31: whatever was used of however many passes, the rest is the same, in the same order, and nothing twice."""
    order = {"epochs": epochs, "shuffle": shuffle, "seed": seed}
    with TemporaryDirectory() as folder:
        path = a_file(folder, size)
        whole = asyncio.run(used(jsonl(path, **order)))
        cut = round(share * len(whole))
        first = jsonl(path, **order)
        before = asyncio.run(used(first, cut))
        position = told(first)
        assert position == Position(cut)
        second = jsonl(path, **order)
        second.restore(position)
        assert second.skips == 0
        assert second.epoch == first.epoch == -(-cut // size)
        assert before + asyncio.run(used(second)) == whole
        assert told(second).used == len(whole) == size * epochs
        assert second.exhausted
        assert second.as_json() == {"used": size * epochs, "epoch": epochs, "exhausted": True, "known_ids": None}


def test_two_passes_have_two_orders_and_are_both_gone_on_with(tmp_path: Path) -> None:
    """A cut in the second pass, whose beginning was read ahead in the first: each pass is whole, in its own order."""
    size = AHEAD // 2
    path = a_file(tmp_path, size)
    whole = asyncio.run(used(jsonl(path, epochs=2)))
    one, two = whole[:size], whole[size:]
    assert one != two
    assert sorted(one) == sorted(two)
    for cut in (size - 1, size, size + 1):
        source = jsonl(path, epochs=2)
        source.restore(Position(cut))
        assert asyncio.run(used(source)) == whole[cut:]


def test_a_file_that_was_used_up_stays_so(tmp_path: Path) -> None:
    """Restored to its end, or beyond what is configured now, it is exhausted and gives nothing."""
    path = a_file(tmp_path, 3)
    for cut in (6, 100):
        source = jsonl(path, epochs=2)
        source.restore(Position(cut))
        assert asyncio.run(used(source)) == []
        assert source.exhausted
        assert source.position == Position(cut)


def test_a_position_far_away_costs_no_reading(tmp_path: Path) -> None:
    """Where a file stands is arithmetic: a million passes are no work."""
    source = jsonl(a_file(tmp_path, 3), shuffle=False)
    source.restore(Position(3_000_001))
    assert asyncio.run(used(source, 3)) == ["p1", "p2", "p0"]
    assert source.epoch == 1_000_002


# -- iterables -----------------------------------------------------------------------------------------------


def lines(first: int, count: int) -> Iterator[dict[str, Any]]:
    return ({"id": f"p{n}", "input_ids": [n]} for n in range(first, first + count))


class Stateful:
    """Counts, in steps that change as it goes on; its state is one object that it keeps changing."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.now = {"given": 0, "step": 1}
        self.asked: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.now["given"] < self.count:
            number, step = self.now["given"], self.now["step"]
            self.now["given"] += 1
            self.now["step"] = step % 7 + 1
            yield {"id": f"p{number}.{step}", "input_ids": [number]}

    def state(self) -> dict[str, int]:
        self.asked.append(threading.current_thread().name)
        return self.now

    def restore(self, state: dict[str, int]) -> None:
        self.asked.append(threading.current_thread().name)
        self.now = dict(state)


def iterated(iterable: Any) -> IteratorSource:
    return IteratorSource(iterable, refused={}, where="s")


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 2 * AHEAD), share=st.floats(0, 1), again=st.floats(0, 1))
def test_an_object_with_a_state_goes_on_at_any_cut(count: int, share: float, again: float) -> None:
    """P31: read-ahead shifts nothing: the state is that after the last line used up; and it may be cut twice."""
    whole = asyncio.run(used(iterated(Stateful(count))))
    found: list[str] = []
    position = Position(0)
    for part in (share, again, 1.0):
        source = iterated(Stateful(count))
        source.restore(position)
        found += asyncio.run(used(source, round(part * (count - len(found)))))
        position = told(source)
        assert position.used == len(found)
        assert source.skips == 0
    assert found == whole


async def test_a_state_is_asked_for_in_the_readers_thread() -> None:
    """The loop never waits for somebody's `state` or `restore`."""
    keeper = Stateful(3)
    source = iterated(keeper)
    source.restore(Position(1, {"given": 1, "step": 2}))
    assert not keeper.asked
    assert await used(source) == ["p1.2", "p2.3"]
    assert set(keeper.asked) == {"prompts:s"}


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 2 * AHEAD), share=st.floats(0, 1))
def test_anything_else_is_read_again(count: int, share: float) -> None:
    """P31: without a state what was used is read again and dropped, and that is said."""
    cut = round(share * count)
    source = iterated(lines(0, count))
    source.restore(Position(cut))
    assert source.skips == cut
    assert asyncio.run(used(source)) == [f"p{n}" for n in range(cut, count)]
    assert source.position == Position(count)


def test_a_state_that_appeared_since_is_begun_with() -> None:
    """A source that had no state when it was written down is read again, though it has one now."""
    source = iterated(Stateful(5))
    source.restore(Position(2))
    assert source.skips == 2
    assert asyncio.run(used(source)) == ["p2.3", "p3.4", "p4.5"]
    assert source.position.state == {"given": 5, "step": 6}


def test_bad_lines_are_used_up_like_others() -> None:
    """A line with a problem is a line: it is counted, and its place is said in its name after a restart as before."""
    bad: list[Any] = [{"input_ids": [1], "id": "a"}, "bad", {"input_ids": [2], "id": "b"}, "bad"]
    whole = asyncio.run(used(iterated(bad)))
    assert whole == ["a", "s.1", "b", "s.3"]
    for cut in range(5):
        source = iterated(bad)
        source.restore(Position(cut))
        assert asyncio.run(used(source)) == whole[cut:]


class Broken(Stateful):
    """Its state cannot be had, or not be written, or not be taken back."""

    def __init__(self, how: str) -> None:
        super().__init__(3)
        self.how = how

    def state(self) -> Any:
        if self.how == "raises":
            raise ValueError("no state today")
        return {"thing": object()} if self.how == "no json" else super().state()

    def restore(self, state: dict[str, int]) -> None:
        raise KeyError("given")


@pytest.mark.parametrize(
    ("how", "position", "said"),
    [
        ("raises", Position(0), r"^s: state\(\) raised ValueError: no state today$"),
        ("no json", Position(0), r"^s: state\(\) gave what JSON cannot hold"),
        ("no restore", Position(1, {"given": 1}), r"^s: restore\(\) raised KeyError: 'given'$"),
    ],
)
async def test_a_bad_state_is_an_error_of_the_source(how: str, position: Position, said: str) -> None:
    """P23: it is raised where the lines are used, with the name of the source, and not swallowed."""
    source = iterated(Broken(how))
    source.restore(position)
    with pytest.raises(RuntimeError, match=said):
        await used(source)


async def test_a_source_that_is_shorter_than_it_was_is_an_error() -> None:
    """P31: one that cannot give what was used before is another source, and is told so, not taken as exhausted."""
    source = iterated(list(lines(0, 3)))
    source.restore(Position(4))
    with pytest.raises(RuntimeError, match="s gave 3 lines, but 4 were used before"):
        await used(source)
    assert not source.exhausted


class Half:
    """Has a state, and no way back to it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def state(self) -> int:
        return 0


class Mute:
    """Keeps a state, and cannot be iterated over."""

    def state(self) -> int:
        return 0

    def restore(self, state: Any) -> None:
        """Nothing."""


@pytest.mark.parametrize(("name", "said"), [("Half", "not restore"), ("Mute", "not iterable")])
def test_half_a_position_is_refused(name: str, said: str) -> None:
    """P35: an object with `state` and no `restore`, or with both and no lines, is refused at its path."""
    with pytest.raises(ConfigError) as refused:
        make_source(PromptsConfig(source=f"{MODULE}:{name}"), refused={}, where="tasks.0.prompts")
    [problem] = refused.value.problems
    assert problem.path == "tasks.0.prompts.source"
    assert said in problem.message


# -- pushes --------------------------------------------------------------------------------------------------


@given(
    pushes=st.lists(st.lists(st.integers(0, 12), max_size=6), max_size=6),
    share=st.floats(0, 1),
    later=st.lists(st.integers(0, 12), max_size=12),
)
def test_pushes_go_on_and_are_accepted_once(pushes: list[list[int]], share: float, later: list[int]) -> None:
    """P1: what was not used comes again, in its order; no id is accepted twice, used or not, before or after."""
    first = PushSource(refused={})
    accepted: dict[str, Any] = {}
    for push in pushes:
        fresh = first.push([line for n in push for line in lines(n, 1)])
        assert not set(accepted) & {line.prompt_id for line in fresh}
        accepted |= {line.prompt_id: line.content for line in fresh}
    assert list(accepted) == list(dict.fromkeys(f"p{n}" for push in pushes for n in push))
    gone = asyncio.run(used(first, round(share * len(accepted))))
    left = {name: content for name, content in accepted.items() if name not in gone}

    second = PushSource(refused={})
    second.restore(told(first))
    second.restore_lines(left, known=gone)
    assert second.as_json()["known_ids"] == len(accepted)
    fresh = second.push([line for n in later for line in lines(n, 1)])
    assert not {line.prompt_id for line in fresh} & set(accepted)
    assert len(fresh) == len({f"p{n}" for n in later} - set(accepted))
    assert asyncio.run(used(second)) == [*left, *(line.prompt_id for line in fresh)]
    assert second.position.used == len(accepted) + len(fresh)


def test_a_restored_line_that_cannot_be_used_now_has_its_problem() -> None:
    """A tokenizer that is gone since: the line keeps its id, and fails with the reason instead of being lost."""
    from rollout_svc.errors import Problem

    source = PushSource(refused={"text": Problem("", "needs a tokenizer")})
    source.restore_lines({"given": {"text": "hello"}, "other": {"input_ids": [1]}})
    line = source.peek()
    assert line is not None
    assert (line.prompt_id, line.content) == ("given", {})
    assert "needs a tokenizer" in str(line.problem)
    source.advance()
    other = source.peek()
    assert other is not None
    assert (other.prompt_id, other.problem) == ("other", None)


def test_ids_are_kept_small() -> None:
    """What is kept of an id for ever is twelve bytes, however long it was."""
    source = PushSource(refused={})
    source.push([{"id": "x" * 10_000, "input_ids": [1]}])
    source.advance()
    assert [len(kept) for kept in source._seen] == [12]
    assert source.push([{"id": "x" * 10_000, "input_ids": [1]}]) == []
