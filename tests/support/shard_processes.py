"""Real processes that own shards, or fetch them: each with a data plane over HTTP, told what to do through a pipe.

They are forked from a server that has imported everything, so that a dozen of them start in a second.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rollout_svc.tensors.rtensor import localize, remotize
from rollout_svc.tensors.shards import Dropped, FetchBuffer, Fetcher, Node, ShardOwner, install

__all__ = ["ShardProcess", "slope"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "tests.support.shard_processes"])  # the first: each child imports what runs
ANSWER_S = 30.0
TOMBSTONES = 256
"""Few, so that they are all there after some steps, and memory that grows is not theirs."""


class _Owner(ShardOwner):
    """An owner whose deletes fail while it is told so."""

    failing = False

    def drop(self, ids: Any) -> Dropped:
        if self.failing:
            raise OSError("the disk is on holiday")
        return super().drop(ids)


class _Part:
    """What a process does when it is told; runs there."""

    def __init__(self, port: int, owns: bool) -> None:
        fetcher = Fetcher(FetchBuffer(max_tombstones=TOMBSTONES))
        install(fetcher)
        self.owner = _Owner() if owns else None
        fetcher.local = self.owner
        self.node = Node(self.owner, fetcher.buffer, port=port)

    def where(self) -> tuple[str, str]:
        return self.node.address, self.node.plane.incarnation

    def make(self, step: int, count: int, size: int) -> Any:
        """Store float32 tensors, each full of its own number."""
        tensors = [np.full(size // 4, step * count + number, dtype=np.float32) for number in range(count)]
        return remotize({"step": step, "tensors": tensors}, self.node)

    def use(self, tree: Any) -> float:
        """Fetch everything of a tree, and look at all of it."""
        local = localize(tree)
        return float(sum(float(tensor.mean()) for part in local for tensor in part["tensors"]))

    def fail(self, failing: bool) -> None:
        assert self.owner is not None
        self.owner.failing = failing

    def rss(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _serve(pipe: Connection, port: int, owns: bool) -> None:
    logging.disable()  # of aiohttp, about the deletes that fail
    part = _Part(port, owns)
    try:
        while True:
            name, given = pipe.recv()
            try:
                pipe.send((True, getattr(part, name)(*given)))
            except Exception as error:  # noqa: BLE001 - told to the test
                pipe.send((False, repr(error)))
    except EOFError:
        part.node.close()


class ShardProcess:
    """One process, as the test has it."""

    def __init__(self, *, owns: bool = False, port: int = 0) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, port, owns), daemon=True)
        self._process.start()
        theirs.close()
        self.address: str
        self.incarnation: str
        self.address, self.incarnation = self.ask("where")()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def ask(self, name: str, *given: Any) -> Callable[[], Any]:
        """Tell it to do something; what is returned waits for the answer."""
        self._pipe.send((name, given))

        def answer() -> Any:
            assert self._pipe.poll(ANSWER_S), f"no answer to {name} in {ANSWER_S} s"
            done, value = self._pipe.recv()
            assert done, value
            return value

        return answer

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.join(ANSWER_S)
        self._pipe.close()
        self._process.close()

    def stop(self) -> None:
        """Have it answer nothing."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on where it was stopped."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Let it end; idempotent."""
        if self._pipe.closed:
            return
        self._pipe.close()
        self._process.join(ANSWER_S)
        self._process.close()


def slope(values: list[float]) -> float:
    """The median of the slopes between all pairs: what a few outliers do not move (Theil and Sen)."""
    places = np.arange(len(values))
    run = places[None, :] - places[:, None]
    rise = np.asarray(values)[None, :] - np.asarray(values)[:, None]
    return float(np.median(rise[run > 0] / run[run > 0]))
