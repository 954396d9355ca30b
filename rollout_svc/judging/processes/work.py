"""The life of a judge process: calls in, answers out, until it is ended.

Invariants:

- Whatever a judger raises is an answer, and so is a result that does not cross or is too large.
- A judger is made once per process, from its description.
- A copy of this process that a judger made by forking never speaks for it.
- A call that was taken back before it began is skipped.
- A process in which judgers leave thread after thread ends between two calls, and says so: nobody's call ends with it.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import deque
from typing import Any, Final

from rollout_svc import blame
from rollout_svc.errors import JudgeFailed
from rollout_svc.judging.processes import frames
from rollout_svc.judging.processes.gathered import Gathered
from rollout_svc.judging.values import plain
from rollout_svc.plugins import PluginSpec, construct

__all__ = ["work"]

_CHUNK: Final = 1 << 18  # bytes read at once


def work(channel: socket.socket) -> None:
    """Serve calls until the other end is gone; never returns in a fork of this process."""
    me, judgers, read = os.getpid(), dict[bytes, Any](), bytearray()
    due: deque[tuple[int, bytes, bytes]] = deque()
    gathered = Gathered()
    channel.setblocking(True)
    channel.sendall(frames.answer(0, 0.0, frames.READY))
    while True:
        while (chunk := _read(channel, wait=not due)) is not None:
            if not chunk:
                return
            read += chunk
            for what in frames.calls(read):
                if isinstance(what, int):
                    _skip(due, what)
                else:
                    due.append(what)
        number, spec, payload = due.popleft()
        begun = time.perf_counter()
        kind, body = _answer(judgers, spec, payload)
        if os.getpid() != me:
            os._exit(0)
        channel.sendall(frames.answer(number, time.perf_counter() - begun, kind, body))
        if gathered.look():
            channel.sendall(frames.answer(0, 0.0, frames.SPENT))
            return


def _skip(due: deque[tuple[int, bytes, bytes]], number: int) -> None:
    """Turn a call that waits into one that answers that it was skipped, at its place in the order."""
    for at, (asked, _, _) in enumerate(due):
        if asked == number:
            due[at] = (number, b"", b"")
            break


def _read(channel: socket.socket, *, wait: bool) -> bytes | None:
    """What is there; None where nothing is and nobody waits for it; empty at the end."""
    try:
        return channel.recv(_CHUNK, 0 if wait else socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None


def _answer(judgers: dict[bytes, Any], spec: bytes, payload: bytes) -> tuple[int, bytes]:
    if not spec:
        return frames.SKIPPED, b""
    try:
        found = judgers.get(spec)
        if found is None:
            target, options, method = pickle.loads(spec)  # noqa: S301 - from the service itself
            found = judgers[spec] = getattr(construct(PluginSpec(target, dict(options)), target), method)
        body = pickle.dumps(plain(found(pickle.loads(payload))))  # noqa: S301 - likewise
    except JudgeFailed as failed:  # the judger's own word: it crosses as it is
        return frames.RESULT, pickle.dumps(JudgeFailed(str(failed.reason), str(failed.message)))
    except BaseException as error:  # noqa: BLE001 - an exit too is the judger's failure, and is told as one
        return frames.FAILED, pickle.dumps(blame.told(error))
    if len(body) > frames.ANSWER_BYTES:
        return frames.FAILED, pickle.dumps((f"its result takes {len(body)} bytes; {frames.ANSWER_BYTES} may cross", ""))
    return frames.RESULT, body
