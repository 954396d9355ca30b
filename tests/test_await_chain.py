"""What a task waits for, told from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator
from typing import Any

from rollout_svc.await_chain import MOST_TOLD, await_chain


async def leaf(future: asyncio.Future[None]) -> None:
    """Wait."""
    await future


async def items(future: asyncio.Future[None]) -> AsyncIterator[int]:
    """Wait inside an asynchronous generator."""
    await leaf(future)
    yield 1


async def over(future: asyncio.Future[None]) -> None:
    """Wait for its item."""
    async for _ in items(future):
        pass


class Wrapped:
    """An awaitable of somebody's own, around a coroutine."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self.future = future

    def __await__(self) -> Generator[Any, None, None]:
        return leaf(self.future).__await__()


async def for_wrapped(future: asyncio.Future[None]) -> None:
    """Wait for that."""
    await Wrapped(future)


async def deep(levels: int, future: asyncio.Future[None]) -> None:
    """Wait far down."""
    if levels:
        await deep(levels - 1, future)
    else:
        await leaf(future)


async def joined(*others: asyncio.Task[None]) -> None:
    """Wait for other tasks."""
    await asyncio.gather(*others)


async def for_one(other: Awaitable[None]) -> None:
    """Wait for one."""
    await other


def names(told: list[str]) -> list[str]:
    """The last word of each entry, without its line."""
    return [entry.rpartition(".")[2].rpartition(":")[0] or entry for entry in told]


async def chain_of(task: asyncio.Task[None]) -> list[str]:
    """The task's chain once everything has begun to wait; then it is ended."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    told = await_chain(task)
    task.cancel()
    await asyncio.wait({task})
    return told


async def test_it_names_module_function_and_line() -> None:
    """The innermost await is the last entry, with the line it is on."""
    loop = asyncio.get_running_loop()
    told = await chain_of(loop.create_task(leaf(loop.create_future())))
    assert told == [f"{__name__}.leaf:{leaf.__code__.co_firstlineno + 2}"]


async def test_it_passes_through_what_python_made_in_c() -> None:
    """Asynchronous generators and wrapped coroutines do not end the chain."""
    loop = asyncio.get_running_loop()
    assert names(await chain_of(loop.create_task(over(loop.create_future())))) == ["over", "items", "leaf"]
    assert names(await chain_of(loop.create_task(for_wrapped(loop.create_future())))) == ["for_wrapped", "leaf"]


async def test_it_goes_on_in_the_task_that_is_waited_for() -> None:
    """A task, alone or gathered, is named, and then told as well; of a gathering, the first that is not done."""
    loop = asyncio.get_running_loop()
    inner = loop.create_task(leaf(loop.create_future()), name="inner")
    assert names(await chain_of(loop.create_task(for_one(inner)))) == ["for_one", "task inner", "leaf"]
    done, inner = loop.create_task(asyncio.sleep(0)), loop.create_task(leaf(loop.create_future()), name="inner")
    await done
    assert names(await chain_of(loop.create_task(joined(done, inner)))) == ["joined", "task inner", "leaf"]


async def test_a_chain_is_bounded() -> None:
    """A long one loses its middle, and an ended task has none."""
    loop = asyncio.get_running_loop()
    told = await chain_of(loop.create_task(deep(300, loop.create_future())))
    assert len(told) == MOST_TOLD
    assert "(263 more)" in told
    assert names(told)[-1] == "leaf"
    assert len(await chain_of(loop.create_task(deep(900, loop.create_future())))) == MOST_TOLD
    done = loop.create_task(asyncio.sleep(0))
    await done
    assert await_chain(done, None) == []
