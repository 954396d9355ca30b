"""Moments in which the whole machine stood still: a virtual machine stopped by its host, or a host with no time for it.

- They are seen by a process of its own, which does nothing but sleep: no lock, loop or load of what is watched can look
  like one, and where this process is late by half a second, every other one on the machine was as well.
- A bound in real time that was missed in such a moment says nothing of the code: what failed then is run once more, and
  that is said. What failed while the machine ran is never run again.
- `python -m tests.support.stalls COMMAND …` runs a command in this way.
"""

from __future__ import annotations

import subprocess
import sys
import time

LEAST_S = 0.5
"""From here on it is a standstill, in seconds: ten times the heartbeat, and far more than a busy scheduler is late."""

_HEART = """
import select, sys, time
asked = True
last = time.monotonic()
while asked is not None:
    ready = select.select([sys.stdin], [], [], 0.05)[0]
    now = time.monotonic()
    late, last = now - last - 0.05, now
    if late > {least}:
        print(time.monotonic(), late, flush=True)
    if ready:
        asked = sys.stdin.readline() or None
        print(flush=True)
"""


class Stalls:
    """The standstills of the machine since this was made; used by one thread."""

    def __init__(self, least_s: float = LEAST_S) -> None:
        """Start to watch; standstills of less than `least_s` are not counted."""
        self._seen: list[tuple[float, float]] = []
        command = [sys.executable, "-S", "-E", "-c", _HEART.format(least=least_s)]
        self._heart = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._heart.pid

    def since(self, moment: float) -> float:
        """Say how long the machine has stood still since a `time.monotonic()`, in seconds, this moment included."""
        assert self._heart.stdin is not None
        assert self._heart.stdout is not None
        self._heart.stdin.write("\n")
        self._heart.stdin.flush()
        while line := self._heart.stdout.readline().strip():
            ended, late = map(float, line.split())
            self._seen.append((ended, late))
        return sum(late for ended, late in self._seen if ended > moment)

    def close(self) -> None:
        """End the watch; idempotent."""
        for pipe in (self._heart.stdin, self._heart.stdout):
            if pipe is not None:
                pipe.close()
        self._heart.kill()
        self._heart.wait()


def main(command: list[str]) -> int:
    """Run a command, and once more where it failed and the machine stood still meanwhile; returns its exit code."""
    stalls = Stalls()
    try:
        began = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        stood = stalls.since(began)
        if code and stood:
            sys.stderr.write(f"the machine stood still for {stood:.1f} s while this failed: once more\n")
            code = subprocess.run(command, check=False).returncode
        return code
    finally:
        stalls.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
