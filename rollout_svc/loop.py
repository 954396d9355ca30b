"""An event loop whose turns are bounded: thousands of answers that land at once are read a slice at a time.

asyncio handles everything that is ready in one turn, so 4,096 answers would hold the loop for a second and whatever
else wants it, an abort or a call of the control API, would wait behind them.

Invariants:

- Sockets given to `in_bulk` hand over at most `SLICE` events a turn, together; every other socket is handed over in
  full, first, in every turn. So control never queues behind data.
- Nobody starves: the kernel keeps ready sockets in a queue and puts those it handed over at its end.
- Where there is no epoll, or the loop is another one, `in_bulk` does nothing: correct, and not bounded.
"""

from __future__ import annotations

import asyncio
import math
import select
import selectors
import socket
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

__all__ = ["SLICE", "BoundedLoop", "in_bulk", "new_event_loop"]

SLICE: Final = 16
"""Events of bulk sockets in one turn: about 3 ms of answers of 256 tokens; at 64 it was 12, and an abort as late."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make the loop the service runs in: `asyncio.Runner(loop_factory=new_event_loop)`."""
    return BoundedLoop() if hasattr(select, "epoll") else asyncio.new_event_loop()


def in_bulk(sock: socket.socket) -> socket.socket:
    """Mark a socket, before it is used, as one of thousands that carry generation; returns it."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, BoundedLoop):
        loop.bulk.mark(sock)
    return sock


class BoundedLoop(asyncio.SelectorEventLoop):
    """A selector loop with a lane for data; see the module's invariants."""

    def __init__(self, size: int = SLICE) -> None:
        self.bulk = _TwoLanes(size)
        super().__init__(self.bulk)


class _TwoLanes(selectors.BaseSelector):
    """Two epolls, the one for data inside the other: one wait wakes for both."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._marked: dict[int, weakref.ref[socket.socket]] = {}
        self._data: set[int] = set()  # registered descriptors that were marked
        self._first = select.epoll()
        self._bulk = select.epoll()
        self._bulk_fd = self._bulk.fileno()
        self._first.register(self._bulk_fd, select.EPOLLIN)

    def mark(self, sock: socket.socket) -> None:
        """Take a socket's descriptor for data until that socket is closed; numbers are given again to others."""
        self._marked[sock.fileno()] = weakref.ref(sock)

    def _is_data(self, fd: int) -> bool:
        marked = self._marked.get(fd)
        if marked is None:
            return False
        sock = marked()
        if sock is not None and sock.fileno() == fd:
            return True
        del self._marked[fd]
        return False

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch a descriptor, in the lane it belongs to."""
        fd = _descriptor(fileobj)
        if fd in self._keys:
            raise KeyError(f"{fileobj!r} (FD {fd}) is already registered")
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        if self._is_data(fd):
            self._data.add(fd)
        try:
            self._lane(fd).register(fd, _mask(events))
        except BaseException:
            del self._keys[fd]
            self._data.discard(fd)
            raise
        return key

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """Watch it no longer."""
        key = self._keys.pop(self.get_key(fileobj).fd)
        try:
            self._lane(key.fd).unregister(key.fd)
        except OSError:
            pass  # the kernel forgets a closed descriptor by itself
        finally:
            self._data.discard(key.fd)
        return key

    def modify(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        """Watch it for something else."""
        key = self.get_key(fileobj)
        if events != key.events:
            self._lane(key.fd).modify(key.fd, _mask(events))
        key = self._keys[key.fd] = key._replace(events=events, data=data)
        return key

    def _lane(self, fd: int) -> select.epoll:
        return self._bulk if fd in self._data else self._first

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready: all of the first lane, then a slice of the data."""
        wait_s = -1.0
        if timeout is not None:  # epoll counts in milliseconds: round up, to wait at least that long
            wait_s = math.ceil(max(timeout, 0.0) * 1e3) * 1e-3
        try:
            found = self._first.poll(wait_s)
        except InterruptedError:
            return []
        ready, bulk, keys = [], False, self._keys
        for fd, mask in found:
            if fd == self._bulk_fd:
                bulk = True
            elif (key := keys.get(fd)) is not None:
                ready.append((key, _events(mask) & key.events))
        if bulk:
            for fd, mask in self._bulk.poll(0, self._size):
                if (key := keys.get(fd)) is not None:
                    ready.append((key, _events(mask) & key.events))
        return ready

    def close(self) -> None:
        """Give both epolls back."""
        self._first.close()
        self._bulk.close()
        self._keys.clear()
        self._marked.clear()
        self._data.clear()

    def get_key(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        """The key of a descriptor; KeyError where it is not watched."""
        try:
            return self._keys[fileobj if isinstance(fileobj, int) else _descriptor(fileobj)]
        except ValueError:  # a socket that is closed already: found by what it was registered as
            for key in self._keys.values():
                if key.fileobj is fileobj:
                    return key
            raise KeyError(f"{fileobj!r} is not registered") from None

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        """Every key, by descriptor."""
        return {fd: key for fd, key in self._keys.items()}  # noqa: C416 - a mapping's key type is invariant


def _descriptor(fileobj: FileDescriptorLike) -> int:
    fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
    if fd < 0:
        raise ValueError(f"invalid file descriptor: {fd}")
    return fd


def _mask(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (
        select.EPOLLOUT if events & selectors.EVENT_WRITE else 0
    )


def _events(mask: int) -> int:
    """An error or a hang-up is told to whoever reads and to whoever writes, as `selectors` does."""
    return (selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0) | (
        selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0
    )
