"""Commands of a shell, many of them: each in a process of its own that has imported already what every one imports.

- One process waits, without threads. For a command it forks one that has its arguments, environment, folder and files,
  runs `main()` there, and ends as Python ends: what a shell sees is the same, without half a second of imports.
- It is started by the first command, one at a time is run, and it ends with the process that started it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["WAIT_S", "run"]

WAIT_S = 30.0
"""How long a process may take, in seconds, before its test fails."""

_WAITING = """
import gc, json, os, sys
import rich.console, rich.markdown, rich.panel, typer.rich_utils
import rollout_svc.asking, rollout_svc.assembly, rollout_svc.cli, rollout_svc.rpc.client, rollout_svc.serve
gc.freeze()  # what is imported is nobody's garbage: no child looks through it at its end
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, path in enumerate(order["files"]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["folder"])
        sys.argv = order["words"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
rollout_svc.cli.main()
"""


@functools.cache
def _waiting() -> subprocess.Popen[str]:
    """Start the process that waits."""
    made = subprocess.Popen(
        [sys.executable, "-c", _WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, made)
    return made


def _end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    waiting = _waiting()
    assert waiting.stdin is not None
    assert waiting.stdout is not None
    words = ["rollout-svc", *map(str, arguments)]
    with TemporaryDirectory() as folder:
        files = [os.devnull, f"{folder}/out", f"{folder}/err"]
        order = {"words": words, "env": os.environ | (env or {}), "folder": str(Path.cwd()), "files": files}
        waiting.stdin.write(json.dumps(order) + "\n")
        waiting.stdin.flush()
        if not select.select([waiting.stdout], [], [], WAIT_S)[0]:
            _waiting.cache_clear()
            os.killpg(waiting.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, WAIT_S)
        code = int(waiting.stdout.readline())
        return subprocess.CompletedProcess(words, code, *(Path(path).read_text() for path in files[1:]))
