"""One real vLLM on a CPU, as a process of this test run's.

- It answers on a free port of loopback, and its log is kept in a file.
- It ends by SIGTERM to its one pid, and the rest of its process group by SIGKILL where that takes too long: after
  `stop` none of it is left, by the kernel's count. It gets the SIGTERM too when this process is killed.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["API_KEY", "BOOT_S", "CONTEXT", "ENGINE_PYTHON", "SLOTS", "Server"]

ROOT: Final = Path(__file__).parents[2]
ENGINE_PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"
"""The interpreter of the environment `make test-vllm` builds."""
CONTEXT: Final = 2048
SLOTS: Final = 8
"""Requests it runs at once; more wait in its queue."""
API_KEY: Final = "data-key"
NAME: Final = "tiny"
BOOT_S: Final = 240.0
"""On two cores, both taken by others, it has taken three minutes."""
STOP_S: Final = 30.0
KILL_S: Final = 10.0
MENDING_TRIES: Final = 3
LOOK_S: Final = 0.1
CALL_S: Final = 30.0
TAIL_CHARS: Final = 4000
"""Of its log, shown when it did not do what it should."""
PR_SET_PDEATHSIG: Final = 1
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # the control routes: abort, pause, weights
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding takes the cores that the tests run on
    "TORCHDYNAMO_DISABLE": "1",  # or the first request with logprobs compiles for 20 s
    "PYTHONPATH": str(ROOT),  # `tests.vllm.backend`
}
FLAGS: Final = (
    *("--enforce-eager", "--dtype", "float32", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--worker-extension-cls", "tests.vllm.backend.Extension", "--weight-transfer-config", '{"backend": "files"}'),
)


class Server:
    """A vLLM that is started and stopped, as often as a test likes, at one address.

    Args:
        model: directory of the model it serves.
        log: where its output goes; grows over restarts.
    """

    def __init__(self, model: Path, log: Path) -> None:
        self.model = model
        self.log = log
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        state = "down" if self._process is None else f"pid={self._process.pid} rc={self._process.poll()}"
        return f"<Server {self.url} {state}>"

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def command(self) -> list[str]:
        """Its command line; the `vllm` command looks for a distribution that this one is not."""
        sizes = ("--max-model-len", CONTEXT, "--max-num-seqs", SLOTS)
        where = ("--host", "127.0.0.1", "--port", self.port, "--served-model-name", NAME, "--api-key", API_KEY)
        module = (ENGINE_PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model)
        return [str(word) for word in (*module, *FLAGS, *sizes, *where)]

    def launch(self) -> None:
        """Start it, and return at once; to be called in the main thread, for it ends with the thread that did."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (one prctl; no lock can be held by a thread it needs)
            )

    def start(self) -> None:
        """Start it, and wait until it is healthy; raises AssertionError with the end of its log."""
        self.launch()
        assert self.wait(self.is_healthy, BOOT_S), f"{self!r} did not start:\n{self.tail()}"

    def is_healthy(self) -> bool:
        """Whether `/health` answers 200; raises AssertionError when it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self!r} ended:\n{self.tail()}"
        return self.is_up()

    def is_up(self) -> bool:
        """Whether `/health` answers 200."""
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def stop(self) -> None:
        """End it and everything it started; idempotent."""
        process = self._process
        if process is None:
            return
        process.terminate()
        if not self.wait(self.is_gone, STOP_S):
            os.killpg(process.pid, signal.SIGKILL)
        assert self.wait(self.is_gone, KILL_S), f"{self!r} left processes: {self.members()}"
        self._process = None

    def signal(self, number: signal.Signals) -> None:
        """Send it and everything it started a signal, where it runs."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End all of it at once, and wait until it is gone; idempotent."""
        self.signal(signal.SIGKILL)
        assert self.wait(self.is_gone, KILL_S), f"{self!r} left processes: {self.members()}"
        self._process = None

    def kill_core(self) -> None:
        """Kill -9 the engine core, and nothing else: the API server has to find out."""
        [core] = [pid for pid, name in self.members().items() if "EngineCore" in name]
        os.kill(core, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Whether it has ended, and with it every process it started."""
        return self._process is None or (self._process.poll() is not None and not self.members())

    def members(self) -> dict[int, str]:
        """The processes of its group that run, by pid, with their command lines."""
        assert self._process is not None
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
                    if int(group) == self._process.pid and state != "Z":
                        found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
                except OSError:  # it ended meanwhile
                    continue
        return found

    def call(self, method: str, path: str, body: Any = None, *, api_key: str = API_KEY) -> tuple[int, Any]:
        """Call one of its routes; returns the status, and the body, decoded where it is JSON.

        Raises:
            OSError: there is no answer.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=CALL_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"{self.url}{path}: {error!r}") from error
        finally:
            connection.close()
        return status, json.loads(text) if text[:1] in ("{", "[") else text

    def do(self, path: str, body: Any = None) -> Any:
        """POST something that has to succeed; returns its answer."""
        status, answer = self.call("POST", path, body)
        assert status == 200, f"{path} -> {status} {answer}"
        assert not isinstance(answer, dict) or answer.get("success", True), f"{path} -> {answer}"
        return answer

    def metric(self, name: str) -> float:
        """A gauge or counter of its own, summed over its labels."""
        return self.metrics(name)[0]

    def metrics(self, *names: str) -> list[float]:
        """Some of them, of one moment; a name may be followed by a label that is to be there (`NAME a="b"`)."""
        status, text = self.call("GET", "/metrics")
        assert status == 200
        found = []
        for name in names:
            metric, _, label = name.partition(" ")
            lines = [line for line in text.splitlines() if line.startswith(f"vllm:{metric}{{") and label in line]
            assert lines, f"no metric {name}"
            found.append(sum(float(line.split()[-1]) for line in lines))
        return found

    def load(self) -> tuple[float, float]:
        """What runs and what waits, by its own gauges; they lag by a step of the engine."""
        running, waiting = self.metrics("num_requests_running", "num_requests_waiting")
        return running, waiting

    def reset(self) -> None:
        """Make it as it was when it started: nothing runs, model `a`'s weights, no label of ours, no cached prefix."""
        self.do("/abort_requests", {})
        self.do("/wake_up")
        self.do("/resume")
        assert self.wait(lambda: self.load() == (0, 0), CALL_S), f"{self!r} is not idle: {self.load()}"
        assert any(self._mended() for _ in range(MENDING_TRIES)), f"{self!r} takes no weights:\n{self.tail()}"
        self.do("/reset_prefix_cache")
        self.do("/update_weight_version", {"new_version": "default"})

    def reload(self, model: Path) -> None:
        """Load a model's weights, and drop what was cached under others: a label is not set."""
        self.do("/collective_rpc", _load(model))
        self.do("/reset_prefix_cache")

    def _mended(self) -> bool:
        """Whether the model it serves could be loaded: a load that failed leaves something behind, over several."""
        self.drop_round()
        return self.call("POST", "/collective_rpc", _load(self.model))[0] == 200

    def round(self, model: Path, parts: int = 3, version: int | None = None) -> None:
        """Move a model's weights by its own transfer, as a trainer does: nobody's pause, flush or label but its own."""
        self.do("/start_weight_update")
        for part in range(parts):
            self.do("/update_weights", {"update_info": {"path": str(model), "part": part, "parts": parts}})
        self.do("/finish_weight_update", None if version is None else {"weight_version": str(version)})

    def drop_round(self) -> None:
        """Have it forget what a load began and did not end: it would count that into the next one."""
        self.call("POST", "/start_weight_update")  # refused where one is open
        self.do("/finish_weight_update")

    def generated(self) -> tuple[float, float]:
        """Tokens it has read and made since it started."""
        read, made = self.metrics("prompt_tokens_total", "generation_tokens_total")
        return read, made

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-TAIL_CHARS:]

    def wait(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Look again and again until it holds, for another process rings no bell; False when it never did."""
        end = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_S)
        return True


def _load(model: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _end_with_parent() -> None:
    """Between fork and exec: have the kernel send SIGTERM when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
