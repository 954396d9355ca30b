"""Sources: nothing waits for them, no line is lost, and a bad line is a line with a problem."""

from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.config import PromptsConfig
from rollout_svc.errors import BadRequest, ConfigError, Problem
from rollout_svc.producer.lines import PromptLine, read_line
from rollout_svc.producer.reading import AHEAD, ReadAhead
from rollout_svc.producer.sources import IteratorSource, JsonlSource, PromptSource, PushSource, make_source
from tests.support.bell import WAIT_S
from tests.support.sources import BAD_LINES

NO_TEXT = {key: Problem("", "needs a tokenizer") for key in ("text", "messages")}


class Reader:
    """Whoever uses a source: takes what is there, and waits to be woken otherwise."""

    def __init__(self, source: PromptSource) -> None:
        self.source = source
        self.woken = asyncio.Event()
        source.open(self.woken.set)

    async def next(self) -> PromptLine | None:
        """The next line, used up; None once the source is exhausted."""
        async with asyncio.timeout(WAIT_S):
            while (line := self.source.peek()) is None:
                if self.source.exhausted:
                    return None
                await self.woken.wait()
                self.woken.clear()
        self.source.advance()
        return line

    async def all(self) -> list[PromptLine]:
        """Every line that is left."""
        found = []
        while (line := await self.next()) is not None:
            found.append(line)
        return found


def iterated(lines: Iterable[Any]) -> IteratorSource:
    return IteratorSource(lines, refused=NO_TEXT, where="s")


def prompts(count: int) -> Iterator[dict[str, Any]]:
    return ({"id": f"p{n}", "input_ids": [n]} for n in range(count))


@given(st.integers(0, 3 * AHEAD))
def test_every_line_comes_once_and_in_order(count: int) -> None:
    """What an iterator gives is shown in its order, each line once, and then the source is exhausted."""

    async def read() -> list[str]:
        source = iterated(prompts(count))
        found = [line.prompt_id for line in await Reader(source).all()]
        assert source.exhausted
        return found

    assert asyncio.run(read()) == [f"p{n}" for n in range(count)]


async def test_a_line_is_there_before_the_next_one_is() -> None:
    """Lines are shown as they come: a source that has given two and hangs has given two."""
    hang, hanging = threading.Event(), threading.Event()

    def two() -> Iterator[dict[str, Any]]:
        yield from prompts(2)
        hanging.set()
        hang.wait(WAIT_S)

    reader = Reader(iterated(two()))
    assert [line.prompt_id for line in (await reader.next(), await reader.next()) if line] == ["p0", "p1"]
    await asyncio.to_thread(hanging.wait, WAIT_S)
    assert reader.source.peek() is None
    assert not reader.source.exhausted
    hang.set()
    assert await reader.next() is None


async def test_peek_uses_nothing_up() -> None:
    """The same line is shown until it is used up."""
    source = PushSource(refused=NO_TEXT)
    source.push(list(prompts(2)))
    assert source.peek() is source.peek()
    source.advance()
    assert source.peek() == PromptLine("p1", {"id": "p1", "input_ids": [1]})


async def test_reading_ahead_is_bounded() -> None:
    """An iterator without end is read `AHEAD` lines ahead, and goes on as they are used up."""
    given = 0
    full = threading.Event()

    def endless() -> Iterator[dict[str, Any]]:
        nonlocal given
        for line in prompts(10**9):
            given += 1
            if given == AHEAD:
                full.set()
            yield line

    reader = Reader(iterated(endless()))
    await asyncio.to_thread(full.wait, WAIT_S)
    assert given == AHEAD
    for number in range(3 * AHEAD):
        line = await reader.next()
        assert line is not None
        assert line.prompt_id == f"p{number}"
    assert given <= 4 * AHEAD
    reader.source.close()
    reader.source.close()


def reading() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "prompts:closing"}


async def test_a_closed_source_ends_its_thread() -> None:
    """Closing returns at once; the thread that waited for room ends, and wakes nobody."""
    source = IteratorSource(prompts(10**9), refused=NO_TEXT, where="closing")
    reader = Reader(source)
    assert await reader.next() is not None
    [thread] = reading()
    assert thread.daemon
    source.close()
    await asyncio.to_thread(thread.join, WAIT_S)
    assert not reading()
    assert not source.exhausted


def bad_exit() -> Iterator[Any]:
    yield from prompts(1)
    raise SystemExit(3)


def bad_value() -> Iterator[Any]:
    yield from prompts(1)
    raise ValueError("broken")


@pytest.mark.parametrize(("lines", "raised"), [(bad_value, ValueError), (bad_exit, RuntimeError)])
async def test_an_iterator_that_raises_raises_where_it_is_used(
    lines: Callable[[], Iterator[Any]], raised: type[Exception]
) -> None:
    """The lines before the error are good; then the error comes, with the traceback of the iterator."""  # P23
    reader = Reader(iterated(lines()))
    assert await reader.next() is not None
    with pytest.raises(raised) as caught:
        await reader.next()
    error = caught.value.__cause__ or caught.value
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert lines.__name__ in {frame.f_code.co_name for frame in frames}
    assert not reader.source.exhausted


@pytest.mark.parametrize("bad", BAD_LINES)
async def test_a_bad_line_is_a_line_with_a_problem(bad: Any) -> None:
    """What cannot be used is handed on with its problem, printable and placed, and nothing of its content."""
    first, wrong, last = await Reader(iterated([*prompts(1), bad, *prompts(1)])).all()
    assert first.problem is last.problem is None
    assert wrong.problem is not None
    assert wrong.problem.startswith("s.1")
    assert (wrong.problem + wrong.prompt_id).encode()
    assert len(wrong.problem.splitlines()) == 1
    assert wrong.content == {}
    with pytest.raises(BadRequest):
        PushSource(refused=NO_TEXT).push([{"input_ids": [1]}, bad])


@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda more: st.dictionaries(st.text() | st.integers(), more))
)
def test_nothing_a_stranger_hands_in_raises(line: Any) -> None:
    """Any object at all is a good line or one with a problem."""
    assert (read_line(line, NO_TEXT, "s.0").problem is None) == (read_line(line, NO_TEXT, "s.0").content != {})


async def test_a_pushed_id_counts_once() -> None:
    """The same id twice, in one push or two, is one line, the first; the pusher is told how many were new."""  # P35
    source = PushSource(refused=NO_TEXT)
    woken = []
    source.open(lambda: woken.append(1))
    assert source.push([{"id": "a", "input_ids": [1]}, {"id": "a", "input_ids": [2]}])
    assert not source.push([{"id": "a", "input_ids": [3]}])
    assert (len(source), len(woken)) == (1, 1)
    line = source.peek()
    assert line is not None
    assert line.content["input_ids"] == [1]


def written(folder: Path, count: int) -> Path:
    path = folder / "p.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in prompts(count)))
    return path


def from_file(path: Path, **settings: Any) -> JsonlSource:
    return JsonlSource(path, PromptsConfig(jsonl=str(path), **settings), refused=NO_TEXT, where="f")


@pytest.mark.parametrize("count", [1, 64, 200])
async def test_a_file_is_read_in_passes(tmp_path: Path, count: int) -> None:
    """Each pass has every line once, in the order of its seed and its number, the same in every run."""
    path = written(tmp_path, count)
    runs = [await Reader(from_file(path, epochs=2, seed=7)).all() for _ in range(2)]
    assert runs[0] == runs[1]
    ids = [line.prompt_id for line in runs[0]]
    wanted = {f"p{n}" for n in range(count)}
    assert len(ids) == 2 * count
    assert set(ids[:count]) == set(ids[count:]) == wanted
    assert count == 1 or ids[:count] != ids[count:]


async def test_the_first_lines_of_a_file_are_there_at_once(tmp_path: Path) -> None:
    """A file that was indexed has a line to show before its thread has had a turn."""
    source = from_file(written(tmp_path, 3), shuffle=False)
    line = source.peek()
    assert line is not None
    assert line.prompt_id == "p0"


async def test_a_file_that_changed_gives_bad_lines(tmp_path: Path) -> None:
    """Lines that are none any more are problems of those lines; a file that is gone is an error of the source."""
    path = written(tmp_path, 100)
    source = from_file(path, epochs=1, shuffle=False)
    path.write_text("x" * path.stat().st_size)
    found = await Reader(source).all()
    assert [line.problem is None for line in found] == [number < 64 for number in range(100)]
    source = from_file(written(tmp_path, 100))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        await Reader(source).all()


def test_a_file_of_conversations_is_refused_at_the_setting_to_blame(tmp_path: Path) -> None:
    """Lines of a kind that can never become tokens are refused where that can be changed, naming the line."""  # P35
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "x"}\n{"messages": [{"role": "user", "content": "x"}]}\n')
    refused = {"messages": Problem("tokenizer.chat_template", "needs one")}
    with pytest.raises(ConfigError) as raised:
        make_source(PromptsConfig(jsonl=str(path)), refused=refused, where="tasks.0.prompts")
    assert str(raised.value) == "tokenizer.chat_template: c.jsonl:2: messages: needs one"
    with pytest.raises(ConfigError) as raised:
        make_source(PromptsConfig(jsonl=str(path)), refused=NO_TEXT, where="tasks.0.prompts")
    assert str(raised.value) == "tasks.0.prompts.jsonl: c.jsonl:1: text: needs a tokenizer"


def test_a_reader_never_opened_can_be_closed() -> None:
    """Closing is safe before the start, and shows what was read."""
    source = ReadAhead("r", iter([(PromptLine("a"), None)]), first=1)
    source.close()
    assert "ahead=1" in repr(source)
