"""Run a module as a process that ends when its starter does.

`python -m rollout_svc.demo.leash MODULE ARGUMENT...` is `python -m MODULE ARGUMENT...` with standard input as the
leash: the starter holds the other end of the pipe, and the system closes it when the starter dies, however it dies.

Invariants:

- The end of standard input is a request to stop (SIGTERM) first, and after `GRACE_S` an end for certain.
- A module that reads standard input cannot be run this way.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from typing import Final

GRACE_S: Final = 5.0
"""Between the request to stop and the end: a clean end takes well under a second."""


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch, name="leash", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
