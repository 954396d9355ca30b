"""One answer with a value to be lifted: its pieces go to threads while the next ones come.

Invariants:

- The loop scans and appends; what takes longer than that is done in a thread, one batch of an answer at a time, and a
  second batch waits at most. While it waits the answer is not read on: its engine feels that.
- A batch is finite work: whoever cancels the reading leaves a thread with some milliseconds of it, and nothing else.
- Nothing is global: the threads are their owner's.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from rollout_svc.engines.calls import Lift
from rollout_svc.engines.lifting.base64 import Base64
from rollout_svc.engines.lifting.numbers import Numbers
from rollout_svc.engines.lifting.scanner import Part, Scanner
from rollout_svc.errors import SampleFailure

__all__ = ["Lifting", "new_threads"]

_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_THREADS: Final = max(1, min(2, _CORES - 1))  # batches decoded at once: the loop has a core to itself, if there are two
_BATCH: Final = 512 * 1024  # bytes handed over together: a hand-over costs as much as decoding 100 KiB of base64
_INLINE: Final = {"base64": 64 * 1024, "numbers": 4 * 1024}  # bytes of a whole value that cost less than a hand-over
_STRING: Final = 64 * 1024  # bytes of a string that is itself: a key has some tens


def new_threads() -> ThreadPoolExecutor:
    """Make the threads of a transport; none is started before the first answer that needs one."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="lift")


class Lifting:
    """Reads one answer.

    Args:
        lift: what is taken out of it.
        threads: where that is decoded.
        length: of the answer, bytes; None: nobody knows.
    """

    __slots__ = (
        "_batch",
        "_decoder",
        "_handed_over",
        "_job",
        "_length",
        "_lift",
        "_open",
        "_scanner",
        "_size",
        "_threads",
    )

    def __init__(self, lift: Lift, threads: ThreadPoolExecutor, length: int | None) -> None:
        self._lift = lift
        self._threads = threads
        self._length = length or 0
        self._scanner = Scanner(lift.key)
        self._decoder: Base64 | Numbers | _Text | None = None
        self._open = False  # the value has begun and not ended
        self._batch: list[bytes] = []
        self._size = 0  # bytes in the batch
        self._handed_over = False
        self._job: asyncio.Future[None] | None = None

    async def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the answer; return those that stay in it.

        Raises:
            SampleFailure: `experts_invalid`, `experts_too_large`.
        """
        rest = [part.data for part in self._scanner.feed(data) if part.kind == "rest" or self._take(part)]
        if self._size >= _BATCH:
            await self._hand_over()
        return rest[0] if len(rest) == 1 else b"".join(rest)

    async def finish(self) -> tuple[bytes, Any]:
        """End an answer that is all there; return what was still to stay in it, and the value, None without one.

        Raises:
            SampleFailure: as `feed`.
        """
        rest = b"".join(part.data for part in self._scanner.finish())
        decoder = self._decoder
        if decoder is None or self._open:  # an answer that ends within a value is for its parser to refuse
            return rest, None
        if self._handed_over or self._size > _INLINE[self._lift.encoding]:
            await self._hand_over()
            await self._done()
        else:
            _decode(decoder, self._batch)
        return rest, decoder.finish()

    def close(self) -> None:
        """Want no more of what is being decoded; idempotent. What a thread is at ends with its batch."""
        job, self._job = self._job, None
        if job is not None:
            job.cancel()  # of one that has failed already, this says that nobody will ask

    def _take(self, part: Part) -> bool:
        """Take what is not the rest; always False."""
        if part.kind == "piece":
            self._batch.append(part.data)
            self._size += len(part.data)
        elif part.kind == "end":
            self._open = False
        else:
            self._begin(part.kind)
        return False

    def _begin(self, kind: str) -> None:
        """Forget the value there was, if there was one: the last one counts."""
        self._batch, self._size, self._handed_over, self._open = [], 0, False, True
        self.close()
        lift = self._lift
        if lift.encoding == "numbers":
            self._decoder = Numbers(lift.max_bytes, self._length) if kind == "list" else _Text()
        elif kind == "list":
            raise SampleFailure("experts_invalid", "routed experts are a list, where base64 is expected")
        else:
            self._decoder = Base64(lift.max_bytes, self._length * 3 // 4)

    async def _hand_over(self) -> None:
        """Give the batch to a thread, once the one before is done."""
        await self._done()
        if self._decoder is None or not self._batch:
            return
        batch, self._batch, self._size, self._handed_over = self._batch, [], 0, True
        self._job = asyncio.get_running_loop().run_in_executor(self._threads, _decode, self._decoder, batch)

    async def _done(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            await job


class _Text:
    """A string that is itself."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = b""

    def feed(self, data: bytes) -> None:
        """Take some of it."""
        self._text += data
        if len(self._text) > _STRING:
            raise SampleFailure("experts_invalid", f"routed experts are a string of over {_STRING} bytes")

    def finish(self) -> str:
        """Return it."""
        return self._text.decode(errors="replace")


def _decode(decoder: Base64 | Numbers | _Text, batch: list[bytes]) -> None:
    for data in batch:
        decoder.feed(data)
