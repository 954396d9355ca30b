"""The service as a process that is killed and started again on the same journal.

- Whoever started it takes it along: it dies with the process that runs this, by the kernel's own doing.
- Everything it needs lies in one folder: prompts, configuration, journal, its log.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

from tests.durability.engine import answer_of, prompt_of

__all__ = ["GROUP_SIZE", "PUSHED_TOKENS", "Dataset", "DidNotStartError", "Site"]

GROUP_SIZE: Final = 2
BATCH: Final = 4
LINE_TOKENS: Final = 8
PUSHED_TOKENS: Final = 24
START_S: Final = 60.0
"""How long a start may take before it is a failure, in seconds."""
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_libc = ctypes.CDLL(None)


class DidNotStartError(AssertionError):
    """Raised when a service ended, or kept silent, before it was ready; quotes its log."""


def _die_with_parent() -> None:
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)


class Dataset:
    """A file of prompts, read in several passes.

    Args:
        lines: how many.
        passes: how often each is read.
        seed: of their order.
    """

    def __init__(self, lines: int, passes: int, seed: int) -> None:
        self.passes = passes
        self.seed = seed
        self.answers = {f"line{number}": answer_of(number, LINE_TOKENS) for number in range(lines)}

    def write(self, path: Path) -> None:
        """Write the file."""
        lines = [
            orjson.dumps({"id": prompt_id, "input_ids": prompt_of(number), "ground_truth": answer})
            for number, (prompt_id, answer) in enumerate(self.answers.items())
        ]
        path.write_bytes(b"\n".join(lines) + b"\n")


class Site:
    """A folder, and the service that runs on it now and again.

    Args:
        folder: exists, and is empty.
        ports: of the engines; the first of them streams.
        lease_s: of a batch.
    """

    def __init__(self, folder: Path, ports: list[int], dataset: Dataset, lease_s: float) -> None:
        self.folder = folder
        self.journal = folder / "journal.db"
        self.log = folder / "service.log"
        self.url = ""
        self.restarts_s: list[float] = []
        self._process: asyncio.subprocess.Process | None = None
        dataset.write(folder / "lines.jsonl")
        self._config = folder / "service.yaml"
        self._config.write_text(yaml.safe_dump(_config(ports, dataset, lease_s)))

    @property
    def runs(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None
        return self._process.pid

    async def ended(self, timeout_s: float) -> int:
        """Wait for its end; returns its exit status."""
        assert self._process is not None
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def spawn(self, *flags: str) -> None:
        """Start a process; it is not ready yet."""
        command = [sys.executable, "-m", "rollout_svc", "serve", "--config", str(self._config), *flags]
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                "--log-level",
                "warning",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                preexec_fn=_die_with_parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    async def ready(self) -> None:
        """Wait until it takes work.

        Raises:
            DidNotStartError: it does not.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                while line := (await process.stdout.readline()).decode():
                    if line.startswith("service.ready"):
                        self.url = line.split("url=")[1].strip()
                        return
        except TimeoutError:
            await self.kill()
        raise DidNotStartError(f"exit code {await process.wait()}:\n{self.tail()}")

    async def start(self, *flags: str) -> None:
        """Start, wait until it is ready, and note how long that took."""
        began = time.monotonic()
        await self.spawn(*flags)
        await self.ready()
        self.restarts_s.append(time.monotonic() - began)

    async def kill(self) -> None:
        """End it as a crash does; idempotent."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        if process.stdout is not None:
            await process.stdout.read()  # past the end of the pipe, so that it can be collected
        await process.wait()

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def _config(ports: list[int], dataset: Dataset, lease_s: float) -> dict[str, Any]:
    """The settings: few requests at a time, so that a moment has much that is half done."""

    def task(name: str, prompts: dict[str, Any], tokens: int) -> dict[str, Any]:
        sampling = {"max_tokens": tokens}
        return {"name": name, "prompts": prompts, "judger": {"name": "exact"}, "sampling": sampling}

    lines = {"jsonl": "lines.jsonl", "shuffle": True, "seed": dataset.seed, "epochs": dataset.passes}
    return {
        "service": {"port": 0},
        "workers": [
            {"url": f"http://127.0.0.1:{port}", "dialect": "sglang", "stream": index == 0}
            for index, port in enumerate(ports)
        ],
        "start_timeout_s": START_S,
        "tasks": [task("lines", lines, LINE_TOKENS), task("pushed", {"push": True}, PUSHED_TOKENS)],
        "trainer": {
            "train_batch_size": BATCH,
            "prompt_repeat_k": GROUP_SIZE,
            "over_sample_threshold": 0.0,
            "max_staleness": 1000,  # steps go on and weights do not: nothing here may be too old
        },
        "pause": {"deadline_s": 2.0, "abort_interval_s": 0.2},
        "buffer": {"path": "journal.db", "lease_s": lease_s},
        "journal": {"partial_interval_s": 0.1},
    }
