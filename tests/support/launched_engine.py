"""An engine to be launched: `python -m tests.support.launched_engine --port P`; a file of a name changes its manners.

- In the folder `--ways`: while `load` exists it does not listen yet, while `hold` exists it answers nothing, and where
  `refuse` exists it ends at once, with exit code 3 and a word on why. Where `stall` is there at its start it never
  answers when it is told to load weights.
- It appends its own number, and that of a child that is deaf to SIGTERM, to the file `pids` there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from tests.support.fake_sglang import FakeSGLang, Hang
from tests.support.sglang_core import Call
from tests.support.sglang_wire import Reply

_POLL_S = 0.02  # seconds between two looks at whether it may go on


async def _serve(port: int, ways: Path) -> None:
    while (ways / "load").exists():  # noqa: ASYNC110 - another process makes and removes it
        await asyncio.sleep(_POLL_S)

    def answer(_: Call) -> Reply | None:
        return None if (ways / "hold").exists() else Reply(tokens=4)

    engine = FakeSGLang()
    engine.port, engine.answer = port, answer
    if (ways / "stall").exists():
        engine.script("/update_weights_from_disk", Hang(), times=None)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with engine:
        await stop.wait()


def _have_a_child(ways: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(60)
    with (ways / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n{child}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ways", type=Path, required=True)
    given = parser.parse_args()
    if (given.ways / "refuse").exists():
        sys.stderr.write("there is no such model\n")
        sys.exit(3)
    _have_a_child(given.ways)
    asyncio.run(_serve(given.port, given.ways))
