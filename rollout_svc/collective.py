"""A group of processes to which the first of them broadcasts tensors: `torch.distributed`, by gloo or NCCL.

The members meet at a store that the first one keeps (`Meeting`). Keys are those of SGLang's and LMDeploy's
`init_custom_process_group`, so that either side may be another program's.

Invariants:

- A group is nobody's default group: a process may be in several, and leave one.
- Nothing waits for longer than the timeout that the group was made with; `close` waits for nothing.
- A group in which anything failed is closed, at once: the others then fail as well, and do not wait out their time.
- A meeting that is closed ends every `join` that is still waiting there.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar, get_args

if TYPE_CHECKING:
    import torch

__all__ = ["BACKENDS", "Backend", "Collective", "CollectiveError", "Doing", "Meeting", "unique_id"]

Backend = Literal["gloo", "nccl"]
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
_DEVICES: Final[dict[Backend, str]] = {"gloo": "cpu", "nccl": "cuda"}  # under which torch keeps each one's keys
_GLOO_THREADS: Final = 2
_POLL_S: Final = 0.0005  # NCCL says only when asked that it is done
_MARGIN_S: Final = 1.0  # by which a wait outlasts what it waits for, which has the same timeout and ends by itself
_CONNECT_S: Final = 1.0  # fewest for a connection
_RETRY_S: Final = 0.02  # between two tries to connect
_SAID_CHARS: Final = 500  # of what torch says of a failure

T = TypeVar("T")


class CollectiveError(OSError):
    """Raised when a group cannot be made, or what was to pass through it did not; the group is closed."""


class Doing(Generic[T]):
    """Work in a thread of its own, which keeps no process from ending."""

    def __init__(self, name: str, work: Callable[[], T], done: Callable[[], object] | None = None) -> None:
        """Begin.

        Args:
            name: of the thread.
            work: what to do.
            done: called there once there is a result or an error.
        """
        self._work: Callable[[], T] | None = work
        self._result: list[T] = []
        self._error: Exception | None = None
        self._done = done
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result; raises what the work raised, or TimeoutError."""
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"{self._thread.name} is not done after {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                self._result.append(work())
        except Exception as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._error = error
        del work
        self._finished.set()
        if self._done is not None:
            self._done()


class Meeting:
    """Where the members of a group find each other: a store, kept by the first of them.

    Attributes:
        host: address on which it listens, and at which the others find it.
        port: chosen by the system.
    """

    def __init__(self, host: str, timeout_s: float) -> None:
        """Listen; raises CollectiveError where that cannot be."""
        self.host = host
        problem = ""
        try:
            listener = socket.create_server((host, 0))
            self.port: int = listener.getsockname()[1]
            self._server: Any = _c10d().TCPStore(
                host,
                self.port,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except (OSError, RuntimeError) as error:
            problem = _said(error)
        if problem:
            raise CollectiveError(f"no group can meet at {host}: {problem}")

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._server = None


class Collective:
    """One member's place in a group; used by one thread at a time, but for `close`.

    Attributes:
        name: of the group.
        closed: whether it is of no use any more.
    """

    def __init__(
        self, backend: Backend, address: tuple[str, int], rank: int, size: int, name: str, timeout_s: float
    ) -> None:
        """Join; returns when all members have, for gloo, and at once for NCCL, whose first broadcast is its join.

        Args:
            backend: how bytes travel.
            address: host and port of the meeting.
            rank: of this member; 0 broadcasts.
            size: how many members there are.
            name: of the group.
            timeout_s: most seconds for anything, this included.

        Raises:
            CollectiveError: somebody did not come in time, or the meeting was closed.
        """
        self.name = name
        self.closed = False
        self._backend: Backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._store: Any = None
        self._lock = threading.Lock()
        self._busy = False
        problem = ""
        try:
            _reach(address, time.monotonic() + (timeout_s if rank else 0.0))  # rank 0 keeps the store, or has closed it
            self._store = _store(backend, address, name, self._timeout)
            make = _gloo if backend == "gloo" else _nccl
            self._group = make(self._store, address, rank, size, self._timeout)
        except (OSError, RuntimeError, ValueError) as error:
            problem = _said(error)
        if problem:
            self.close()
            raise CollectiveError(f"group {name}: {size} members did not meet: {problem}")

    def __repr__(self) -> str:
        return f"<Collective {self.name} {self._backend}{' closed' if self.closed else ''}>"

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have every member's tensors be those of rank 0, one after the other; contiguous ones.

        Raises:
            CollectiveError: not in time, or a member is gone.
        """
        options = _c10d().BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._timeout
        full = [tensor.detach() for tensor in tensors if tensor.numel()]
        self._do("broadcast", [partial(_broadcast, tensor, options) for tensor in full])

    def warm_up(self, device: torch.device) -> None:
        """Sum one number over all members, which is what vLLM's do first; raises CollectiveError."""
        import torch  # noqa: PLC0415

        one = torch.zeros(1, device=device)
        self._do("all_reduce", [lambda group: group.allreduce([one])])

    def close(self) -> None:
        """Leave; idempotent, from any thread. Where one is in a call, the group goes when that ends, by its timeout."""
        with self._lock:
            self.closed = True
            if not self._busy:
                self._group = self._store = None  # the last reference would wait for what runs: nothing does

    def _do(self, what: str, calls: Iterable[Callable[[Any], Any]]) -> None:
        """Make calls to the group; raises CollectiveError, and the group is closed then."""
        with self._lock:
            if self.closed:
                raise CollectiveError(f"group {self.name} is closed")
            self._busy = True
        problem = ""
        try:
            self._make(calls)
        except (OSError, RuntimeError, ValueError) as error:  # raised below: its traceback would keep the group
            problem = _said(error)
            if self._backend == "nccl":  # it would wait for what runs, for good
                with suppress(RuntimeError):
                    self._group.abort()
        with self._lock:
            self._busy = False
        if problem or self.closed:
            self.close()
            raise CollectiveError(f"group {self.name}: {what}: {problem or 'it was closed meanwhile'}")

    def _make(self, calls: Iterable[Callable[[Any], Any]]) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        if self._backend == "gloo":
            for call in calls:  # one after the other: what had been begun would run on when one fails
                call(self._group).wait(timedelta(seconds=max(deadline - time.monotonic(), 0.0) + _MARGIN_S))
            return
        for work in [call(self._group) for call in calls]:
            while not work.is_completed():  # its wait() would only order streams
                if time.monotonic() > deadline:
                    raise TimeoutError("not done in time")
                time.sleep(_POLL_S)
            work.wait()


def unique_id(address: tuple[str, int], name: str, timeout_s: float) -> bytes:
    """What members that do not meet by torch's keys need to join a group by NCCL; waits for rank 0 to have made it.

    Raises:
        CollectiveError: it has not, in time.
    """
    problem = ""
    try:
        # A connection of its own: one that waits is held for as long, and rank 0 could not say it.
        return bytes(_store("nccl", address, name, timedelta(seconds=timeout_s)).get("0"))  # of the first communicator
    except (OSError, RuntimeError) as error:
        problem = _said(error)
    raise CollectiveError(f"group {name}: no unique id: {problem}")


def _broadcast(tensor: torch.Tensor, options: Any, group: Any) -> Any:
    return group.broadcast([tensor], options)


def _c10d() -> Any:
    """`torch.distributed`, which does not say what it exports; it takes seconds to import: only for who uses it."""
    return importlib.import_module("torch.distributed")


def _reach(address: tuple[str, int], deadline: float) -> None:
    """Wait for somebody to listen; raises OSError. torch's own wait may take three times the timeout it is given."""
    while True:
        try:
            socket.create_connection(address, timeout=max(deadline - time.monotonic(), _CONNECT_S)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _store(backend: Backend, address: tuple[str, int], name: str, timeout: timedelta) -> Any:
    """The keys of the group, over a connection of its own."""
    host, port = address
    store = _c10d().TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    for prefix in (name, f"{name}/", f"{_DEVICES[backend]}/"):
        store = _c10d().PrefixStore(prefix, store)
    return store


def _gloo(store: Any, address: tuple[str, int], rank: int, size: int, timeout: timedelta) -> Any:
    gloo = _c10d().ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001 - the only way to a device and a timeout of one's own
    if "GLOO_SOCKET_IFNAME" in os.environ:
        device = gloo.create_default_device()
    else:
        device = gloo.create_device(hostname=_own_address(address))
    options._devices = [device]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    options._threads = _GLOO_THREADS  # noqa: SLF001
    return gloo(store, rank, size, options)


def _nccl(store: Any, _: tuple[str, int], rank: int, size: int, timeout: timedelta) -> Any:
    distributed = _c10d()
    if not distributed.is_nccl_available():
        raise ValueError("this torch has no NCCL")
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return distributed.ProcessGroupNCCL(store, rank, size, options)


def _own_address(peer: tuple[str, int]) -> str:
    """Which address of this machine another one is reached from; sends nothing."""
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def _said(error: Exception) -> str:
    return (str(error).split("\n", 1)[0] or type(error).__name__)[:_SAID_CHARS]
