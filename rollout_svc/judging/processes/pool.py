"""The pool of judge processes: the shell around `lines.py`, in the loop.

Invariants:

- A call ends once: by its answer, its timeout, the end of its process, or its caller's cancellation.
- A call that times out or is cancelled while it runs takes its process with it, and all that this one started; another
  process takes its place at once.
- The clock of a call starts when a process can begin it, so that queueing is not counted.
- What a judger raised, or where it was when its process was ended, is told with the file and line of its own code.
- Nothing here waits for a judge process: what it does not read is kept, what it does not say is timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from rollout_svc.judging.processes import frames
from rollout_svc.judging.processes.lines import Job, Lines, Seat
from rollout_svc.judging.processes.process import JudgeProcess, make_warden, wait_for
from rollout_svc.judging.values import JudgerError, TimedFuture
from rollout_svc.plugins import PluginSpec

__all__ = ["JudgePool", "JudgerError"]

_CHUNK: Final = 1 << 18  # bytes read at once
_BURIAL_S: Final = 2.0  # seconds to wait for where an ended process was; its caller then hears without
_STARTS: Final = 3  # judge processes in a row that end before they take a call
_SPECS: Final = 64  # judgers whose description is kept as bytes


@dataclass(eq=False, slots=True)
class _Call:
    """Who waits for a call."""

    job: Job
    future: TimedFuture


class JudgePool:
    """A pool of killable judge processes, started at the first call, in the loop of that call."""

    def __init__(self, max_workers: int) -> None:
        self._size = max_workers
        self._numbers = count(1)
        self._ending: asyncio.Future[None] | None = None
        self._specs: dict[tuple[int, str], tuple[PluginSpec, bytes]] = {}
        self._reset()

    def _reset(self) -> None:
        self._lines = Lines()
        self._calls: dict[int, _Call] = {}
        self._processes: dict[Seat, JudgeProcess] = {}
        self._unborn: deque[JudgeProcess] = deque()
        self._warden: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._stillborn = 0

    def submit(self, spec: PluginSpec, method: str, payload: Any, timeout_s: float) -> TimedFuture:
        """Run `method(payload)` of the judger in a process; see `judging.ProcessRunner`."""
        key, body = self._described(spec, method), pickle.dumps(payload)
        number = next(self._numbers)
        job = Job(number, key, frames.call(number, key, body), timeout_s)
        future = TimedFuture(job.clock)
        future.add_done_callback(lambda done: self._drop(number) if done.cancelled() else None)
        self._wait(_Call(job, future))
        return future

    def _wait(self, call: _Call) -> None:
        self._calls[call.job.number] = call
        self._lines.waiting.append(call.job)
        if self._starting is None:
            self._starting = _loop().create_task(self._start(), name="judge-processes")
        self._pump_soon()

    async def close(self) -> None:
        """Kill what runs and end the processes; idempotent."""
        calls, starting = self._calls, self._starting
        if self._ending is not None:
            await self._ending
        if starting is None:
            return
        self._calls = {}
        _fail(calls.values(), "its process was ended: the judge processes closed")
        with contextlib.suppress(OSError):
            await asyncio.shield(starting)
        warden = self._warden
        self._let_go()
        if warden is not None:
            await asyncio.to_thread(wait_for, warden)

    def _described(self, spec: PluginSpec, method: str) -> bytes:
        known = self._specs.get((id(spec), method))
        if known is None:
            if len(self._specs) >= _SPECS:
                self._specs.clear()
            written = pickle.dumps((spec.target, tuple(sorted(spec.options.items())), method))
            known = self._specs[id(spec), method] = (spec, written)  # the spec is kept, or its id could be another's
        return known[1]

    async def _start(self) -> None:
        """Start the warden, in a thread, for that blocks; then the processes."""
        try:
            self._warden, control = await asyncio.to_thread(make_warden)
        except OSError as error:
            self._break(f"no judge process can be started: {error}")
            return
        self._control = control
        _loop().add_reader(control, self._hear_warden)
        for _ in range(self._size):
            self._fork()

    def _break(self, why: str) -> None:
        """Fail every call and let everything go; the next call starts again."""
        calls = self._calls
        self._drop_all()
        _fail(calls.values(), why)

    def _lose_warden(self, why: str) -> None:
        """Fail the calls that ran, one of which may have done it, and have the others wait for another warden."""
        calls = self._calls.values()
        ran = [call for call in calls if call.job.begun is not None]
        if not ran:  # nobody did it, and it may go on for ever
            self._break(why)
            return
        others = [call for call in calls if call.job.begun is None]
        self._drop_all()
        _fail(ran, why)
        for call in others:
            self._wait(call)

    def _drop_all(self) -> None:
        warden = self._warden
        self._let_go()
        if warden is not None:
            self._ending = _loop().run_in_executor(None, wait_for, warden)

    def _let_go(self) -> None:
        if self._control is not None:
            _loop().remove_reader(self._control)
            self._control.close()
        for process in (*self._processes.values(), *self._unborn):
            process.forget(_loop())
        if self._timer is not None:
            self._timer.cancel()
        self._reset()

    # Judge processes: made, heard, ended.

    def _fork(self) -> None:
        if self._control is None:
            return
        process, theirs = JudgeProcess.unborn()
        try:
            socket.send_fds(self._control, [b"F"], [theirs.fileno(), process.trace])
        except OSError as error:
            process.forget(_loop())
            self._lose_warden(f"no judge process can be started: {error}")
            return
        finally:
            theirs.close()
        self._unborn.append(process)
        self._processes[process.seat] = process
        _loop().add_reader(process.channel, self._hear, process)

    def _hear_warden(self) -> None:
        if self._control is None:
            return
        try:
            message = self._control.recv(64)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose_warden("its process was ended: what keeps the judge processes was killed")
            return
        word, *numbers = message.decode().split()
        if word == "P":
            process = self._unborn.popleft()
            process.pid = int(numbers[0])
            if process.ending:
                self._ask_end(process)
        else:
            self._gone(int(numbers[0]), int(numbers[1]))

    def _hear(self, process: JudgeProcess) -> None:
        """Read what a judge process says."""
        if process.ending:
            return
        try:
            chunk = process.channel.recv(_CHUNK)
            process.read += chunk
            found = frames.answers(process.read)
        except BlockingIOError:
            return
        except (OSError, frames.Broken) as error:
            self._end(process, JudgerError(str(error)))
            return
        now = _loop().time()
        for answer in found:
            self._answered(process, answer, now)
        if not chunk:
            self._end(process, None)
        if found:
            self._pump()

    def _answered(self, process: JudgeProcess, answer: frames.Answer, now: float) -> None:
        if answer.kind == frames.READY:
            process.ready = True
            self._stillborn = 0
            self._lines.seats[process.seat] = None
            return
        if answer.kind == frames.SPENT and process.answered:  # else a judger could have its call begun for ever
            self._lines.give_back(process.seat)
            self._end(process, None)
            return
        ran = None if answer.kind == frames.SKIPPED else answer.run_s
        process.answered = True
        job = self._lines.answered(process.seat, answer.number, now, ran)
        if job is None:
            self._end(process, JudgerError("its process answered what it was not asked"))
        elif not job.recalled and (call := self._calls.pop(job.number, None)) is not None:
            _settle(call, answer)

    def _end(self, process: JudgeProcess, why: Exception | None) -> None:
        """Take a process out of service; its call hears of it when the process is gone, and in time anyway."""
        if process.ending:
            return
        process.ending = True
        process.why = why
        process.lost = self._lines.leave(process.seat)
        if process.lost is not None and process.lost.begun is not None:
            process.lost.clock.run_s = _loop().time() - process.lost.begun
        _loop().remove_reader(process.channel)
        _loop().remove_writer(process.channel)
        process.timer = _loop().call_later(_BURIAL_S, self._tell, process, None)
        if process.pid:
            self._ask_end(process)
        self._stillborn += not process.ready
        if self._stillborn < _STARTS:
            self._fork()
            self._pump_soon()
        else:
            self._break("no judge process can be started: they end at once")

    def _ask_end(self, process: JudgeProcess) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):  # the warden is gone: it is heard
                self._control.send(f"K {process.pid}".encode())

    def _gone(self, pid: int, code: int) -> None:
        for process in self._processes.values():
            if process.pid == pid:
                self._end(process, None)
                if self._processes.pop(process.seat, None) is not None:  # else all of them were let go
                    self._tell(process, code)
                    process.forget(_loop())
                return

    def _tell(self, process: JudgeProcess, code: int | None) -> None:
        """Fail the call that a process took with it."""
        job, process.lost = process.lost, None
        call = None if job is None else self._calls.pop(job.number, None)
        if call is not None and not call.future.done():
            call.future.set_exception(process.loss(code))

    # Calls: sent, timed, dropped.

    def _pump_soon(self) -> None:
        if not self._pumping:
            self._pumping = True
            _loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        now = _loop().time()
        touched: dict[JudgeProcess, None] = {}
        for seat, job in self._lines.assign(now):
            process = self._processes[seat]
            process.unsent += job.frame
            touched[process] = None
        for process in touched:
            self._send(process)
        self._set_timer()

    def _send(self, process: JudgeProcess) -> None:
        if process.ending:
            return
        try:
            sent = process.channel.send(process.unsent) if process.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._end(process, None)
            return
        del process.unsent[:sent]
        if process.unsent:
            _loop().add_writer(process.channel, self._send, process)
        else:
            _loop().remove_writer(process.channel)

    def _set_timer(self) -> None:
        at = self._lines.look_at()
        if at is None or (self._timer is not None and self._timer.when() <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = _loop().call_at(at, self._look)

    def _look(self) -> None:
        """End those that are late, and call back those behind the slow."""
        self._timer = None
        now = _loop().time()
        for seat in self._lines.late(now):
            self._hear(self._processes[seat])  # it may have answered just now
        for seat in self._lines.late(now):
            self._end(self._processes[seat], TimeoutError())
        touched: dict[JudgeProcess, None] = {}
        for seat, job in self._lines.call_back(now):
            process = self._processes[seat]
            process.unsent += frames.skip(job.number)
            touched[process] = None
        for process in touched:
            self._send(process)
        self._pump()

    def _drop(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        seat = self._lines.drop(call.job)
        if seat is not None:
            self._end(self._processes[seat], None)


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _settle(call: _Call, answer: frames.Answer) -> None:
    future = call.future
    if future.done():
        return
    try:
        body = pickle.loads(answer.body)  # noqa: S301 - from a process of ours, by its own channel
    except Exception as unreadable:  # noqa: BLE001 - the judger's own objects, and its own error
        future.set_exception(JudgerError(f"its result cannot be read: {type(unreadable).__name__}: {unreadable}"))
        return
    if answer.kind == frames.RESULT:
        future.set_result(body)
        return
    error = JudgerError(body[0])
    error.add_note(body[1])
    future.set_exception(error)


def _fail(calls: Any, why: str) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_exception(JudgerError(why))
