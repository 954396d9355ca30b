"""This process's one connection to a Ray cluster, for whoever first needs it.

Invariants:

- A second `ray.init` beside the first is an error, so one caller connects at a time, whoever it is.
- A process that is connected stays connected to what it is connected to; `is_cluster` tells whether that is another.
- `join` ends, whatever is at the address: Ray itself goes on trying for as long as nobody answers there. `connect` is
  for whoever has a thread with a bound already.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

__all__ = ["AUTO", "JOIN_S", "check_reachable", "connect", "first_line", "is_cluster", "join"]

T = TypeVar("T")
AUTO: Final = "auto"
"""The address of whichever cluster Ray finds by itself."""
JOIN_S: Final = 60.0
"""Seconds for a cluster to take this process in; it takes a few."""
_REACH_S: Final = 5.0  # seconds for a cluster to take a connection
_ASK_S: Final = 15.0  # seconds for a cluster to say which it is; it takes milliseconds
_PLACE: Final = re.compile(r"(ray://)?([^:/]+):(\d+)")
_CONNECTING: Final = threading.Lock()


def connect(address: str) -> None:
    """Connect to a cluster, unless this process is connected already; blocks.

    Args:
        address: of the cluster; `auto` finds the one that runs on this machine.

    Raises:
        ConnectionError: nobody listens there, or there is no cluster.
        Exception: whatever else Ray says of an address.
    """
    import ray  # noqa: PLC0415 - takes a second to import: only for who uses it

    with _CONNECTING:
        if not ray.is_initialized():
            check_reachable(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)


def join(address: str, timeout_s: float = JOIN_S) -> None:
    """Connect to a cluster until `timeout_s`, unless this process is connected already.

    Raises:
        ConnectionError: there is no cluster, or it does not answer in time.
    """
    try:
        import ray  # noqa: PLC0415, F401 - as above
    except ImportError as error:
        raise ConnectionError("Ray is not installed here") from error
    try:
        _bounded(lambda: connect(address), timeout_s)
    except TimeoutError as error:
        raise ConnectionError(f"no Ray cluster at {address} answered within {timeout_s:g} s") from error
    except ConnectionError:
        raise
    except Exception as error:  # Ray's own words for what it cannot make use of
        raise ConnectionError(f"{address}: {first_line(error) or type(error).__name__}") from error


def check_reachable(address: str) -> None:
    """Raise ConnectionError where nobody listens: Ray would go on trying."""
    place = _PLACE.fullmatch(address)
    if place is None:
        return
    try:
        socket.create_connection((place[2], int(place[3])), timeout=_REACH_S).close()
    except OSError as error:
        kind = type(error) if isinstance(error, ConnectionError) else ConnectionError
        raise kind(f"nobody listens at {address}: {error.strerror or error}") from error
    except (OverflowError, UnicodeError) as error:  # a port, or a name, that there cannot be
        raise ConnectionError(f"{address}: {error}") from error


def is_cluster(address: str) -> bool:
    """Whether an address means the cluster that this process is connected to; asks there, where it reads otherwise.

    Args:
        address: as `connect` takes it; `auto` means whichever it is connected to.

    Raises:
        ConnectionError: whoever is there did not say which cluster it is.
    """
    import ray  # noqa: PLC0415 - as above

    here: str = ray.get_runtime_context().gcs_address
    if address in (AUTO, here):
        return True
    place = _PLACE.fullmatch(address)
    if place is None:
        return False
    if place[1] is not None:  # of Ray's client: another port of the head's
        host = here.rpartition(":")[0]
        return bool(_addresses(place[2]) & _addresses(host)) or (_is_own(place[2]) and _is_own(host))
    check_reachable(address)
    try:
        return _bounded(lambda: _cluster_id(address) == _cluster_id(here), _ASK_S)
    except TimeoutError as error:
        raise ConnectionError(f"nobody at {address} answered as a Ray cluster within {_ASK_S:g} s") from error


def _cluster_id(address: str) -> str:
    import ray  # noqa: PLC0415 - as above

    inner: Any = ray._raylet  # noqa: SLF001 - which cluster is at an address is told nowhere else
    return str(inner.GcsClient(address=address).cluster_id.hex())


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return {host}


def _is_own(host: str) -> bool:
    """Whether it is one of this machine's."""
    try:
        with socket.create_server((host, 0)):
            return True
    except (OSError, UnicodeError):
        return False


def _bounded(call: Callable[[], T], timeout_s: float) -> T:
    """Call in a thread that nobody joins: where it hangs it holds up neither the caller nor the process's end."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, whoever waits is told
            done.set_exception(error)

    threading.Thread(target=work, name="ray-connect", daemon=True).start()
    return done.result(timeout_s)


def first_line(error: Exception) -> str:
    """What an error says; of one that was raised in another process the cause, without the traceback it quotes."""
    said = str(getattr(error, "cause", None) or error).strip()
    return said.splitlines()[0][:200] if said else ""
