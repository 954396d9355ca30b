"""The one fetcher of this process, with the one fetch buffer that is drained at step end.

Invariants:

- One per process, made when it is first asked for. A child that is forked has one of its own: of the parent's it would
  share connections, and hold what nobody drains.
"""

from __future__ import annotations

import os
from threading import Lock

from rollout_svc.tensors.shards.buffer import FetchBuffer
from rollout_svc.tensors.shards.fetching import Fetcher

__all__ = ["fetch_buffer", "fetcher", "install"]


class _Process:
    def __init__(self) -> None:
        self.lock = Lock()
        self.fetcher: Fetcher | None = None

    def forked(self) -> None:
        self.lock = Lock()
        if self.fetcher is not None:
            self.fetcher = self.fetcher.forked()


_process = _Process()
os.register_at_fork(after_in_child=_process.forked)


def fetcher() -> Fetcher:
    """Return the fetcher of this process."""
    with _process.lock:
        if _process.fetcher is None:
            _process.fetcher = Fetcher()
        return _process.fetcher


def fetch_buffer() -> FetchBuffer:
    """Return the fetch buffer of this process: to be drained, and to be asked for its statistics."""
    return fetcher().buffer


def install(new: Fetcher) -> Fetcher | None:
    """Make this the fetcher of the process: with a token, another cap, another transport; return the one before."""
    with _process.lock:
        old, _process.fetcher = _process.fetcher, new
        return old
