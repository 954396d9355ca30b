"""One answer with a value to be lifted: what the loop does itself, what it leaves to threads, and when it waits."""

import asyncio
import gc
import json
import threading
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollout_svc.engines.calls import Lift
from rollout_svc.engines.lifting import Lifting
from rollout_svc.errors import SampleFailure

KEY = "routed_experts"
MIB = 1 << 20
PATIENCE_S = 20.0


class Threads(ThreadPoolExecutor):
    """One thread that counts what it is given, and can be held."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: list[Future[Any]] = []
        self.open = threading.Event()
        self.open.set()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def held() -> Any:
            self.open.wait(PATIENCE_S)
            return fn(*args, **kwargs)

        self.given.append(super().submit(held))
        return self.given[-1]


@pytest.fixture
def threads() -> Iterator[Threads]:
    with Threads() as made:
        yield made
        made.open.set()


def lifting(threads: Threads, encoding: Any = "base64", *, max_bytes: int = 1 << 30) -> Lifting:
    return Lifting(Lift(KEY, encoding, max_bytes), threads, None)


async def read(reading: Lifting, *pieces: bytes) -> tuple[bytes, Any]:
    """Feed and finish; what stays, and the value."""
    rest = b"".join([await reading.feed(piece) for piece in pieces])
    last, value = await reading.finish()
    return rest + last, value


@asynccontextmanager
async def stuck(task: asyncio.Task[Any], threads: Threads) -> AsyncIterator[None]:
    """A body that runs while a task waits for the held thread, and let it go afterwards."""
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    yield
    threads.open.set()


async def test_a_small_value_costs_no_thread(threads: Threads) -> None:
    """Handing over costs more than decoding it."""
    text = b64encode(bytes(range(256)) * 100)
    assert await read(lifting(threads), b'{"a":1,"routed_experts":"' + text + b'"}') == (
        b'{"a":1,"routed_experts":null}',
        bytes(range(256)) * 100,
    )
    assert threads.given == []


@pytest.mark.parametrize("encoding", ["base64", "numbers"])
async def test_a_big_value_is_decoded_elsewhere(threads: Threads, encoding: str) -> None:
    """In batches, none of it in the loop, and the same comes out."""
    array = np.random.default_rng(0).integers(0, 128, (20_000, 6, 8)).astype("<i4")
    text = b'"%b"' % b64encode(array.tobytes()) if encoding == "base64" else json.dumps(array.tolist()).encode()
    body = b'{"routed_experts":' + text + b"}"
    pieces = [body[at : at + 100_000] for at in range(0, len(body), 100_000)]
    rest, value = await read(lifting(threads, encoding), *pieces)
    assert rest == b'{"routed_experts":null}'
    assert bytes(value) == array.tobytes() if encoding == "base64" else (value == array).all()
    assert len(body) // MIB <= len(threads.given) <= 2 * len(body) // MIB + 1


async def test_while_decoding_lags_nothing_more_is_read(threads: Threads) -> None:
    """One batch is decoded, one waits, and with that the reading waits: memory is bounded by it."""
    threads.open.clear()
    reading = lifting(threads)
    await reading.feed(b'{"routed_experts":"')
    await reading.feed(b"A" * MIB)
    task = asyncio.create_task(reading.feed(b"A" * MIB))
    async with stuck(task, threads):
        assert len(threads.given) == 1
    await asyncio.wait_for(task, PATIENCE_S)
    await reading.feed(b'"}')
    _, value = await reading.finish()
    assert len(value) == 2 * MIB * 3 // 4


async def test_whoever_is_cancelled_leaves_no_work(threads: Threads) -> None:
    """A batch that waits for a thread is never begun; the one under way is the last."""  # P14
    blocker = lifting(threads)
    threads.open.clear()
    await blocker.feed(b'{"routed_experts":"' + b"A" * MIB)
    reading = lifting(threads)
    await reading.feed(b'{"routed_experts":"' + b"A" * MIB)
    task = asyncio.create_task(reading.feed(b"A" * MIB))
    async with stuck(task, threads):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        reading.close()
        reading.close()
        assert [job.cancelled() for job in threads.given] == [False, True]
    blocker.close()


async def test_what_fails_after_the_end_is_told_to_nobody(threads: Threads) -> None:
    """A batch of an answer that was given up may be no base64: that is nobody's failure any more."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    reading = lifting(threads)
    await reading.feed(b'{"routed_experts":"' + b"!" * MIB)
    await asyncio.wait_for(asyncio.wrap_future(_done(threads.given[0])), PATIENCE_S)
    for _ in range(10):
        await asyncio.sleep(0)
    reading.close()
    del reading
    threads.given.clear()
    gc.collect()
    assert told == []


def _done(job: Future[Any]) -> Future[None]:
    """One that is done when that one is, whatever came of it."""
    done: Future[None] = Future()
    job.add_done_callback(lambda _: done.set_result(None))
    return done


async def test_the_last_that_is_not_null_counts(threads: Threads) -> None:
    """A later value replaces an earlier one, also one that is being decoded, or was no value."""
    text = b64encode(bytes(MIB))
    events = [b'{"routed_experts":"%b"}' % value for value in (b"!" * MIB, b"QUJD", text, b"RU8=")]
    for count, last in ((3, bytes(MIB)), (4, b"EO"), (2, b"ABC")):
        rest, value = await read(lifting(threads), *events[:count], b'{"routed_experts":null}')
        assert (rest, bytes(value)) == (b'{"routed_experts":null}' * (count + 1), last)


async def test_an_answer_without_it(threads: Threads) -> None:
    """Nothing was lifted, and nothing is missing."""
    body = b'{"a":"\\"routed_experts\\":","routed_experts":null,"b":"rou'
    assert await read(lifting(threads), body) == (body, None)


async def test_a_string_instead_of_numbers_is_itself(threads: Threads) -> None:
    """A key of LMDeploy's, of a sane length; and an empty list is an array of no rows."""
    assert (await read(lifting(threads, "numbers"), b'{"routed_experts":"00ff"}'))[1] == "00ff"
    assert (await read(lifting(threads, "numbers"), b'{"routed_experts":[]}'))[1].shape == (0, 0, 0)
    with pytest.raises(SampleFailure, match="experts_invalid"):
        await read(lifting(threads, "numbers"), b'{"routed_experts":"' + b"f" * 70_000, b'"}')


async def test_a_list_instead_of_base64_is_refused(threads: Threads) -> None:
    """At its first byte."""
    with pytest.raises(SampleFailure, match="experts_invalid"):
        await lifting(threads).feed(b'{"routed_experts":[')


@pytest.mark.parametrize("encoding", ["base64", "numbers"])
async def test_too_much_is_refused_while_it_comes(threads: Threads, encoding: str) -> None:
    """No more than a batch or two after the limit, whatever would still have come."""
    reading = lifting(threads, encoding, max_bytes=MIB)
    first, more = (b'"', b"AAAA" * (MIB // 4)) if encoding == "base64" else (b"[[[0]]", b",[[0]]" * (MIB // 3))
    with pytest.raises(SampleFailure, match="experts_too_large"):
        await read(reading, b'{"routed_experts":' + first, more, more, more, more, b"!" * MIB)
    reading.close()


async def test_an_answer_that_ends_within_the_value(threads: Threads) -> None:
    """There is no value then, and what stays is no JSON: its parser refuses it."""
    assert await read(lifting(threads), b'{"routed_experts":"AAAA') == (b'{"routed_experts":null', None)
