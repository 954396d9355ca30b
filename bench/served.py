"""The service as a child process of a bench, and the little of its API that a bench needs.

Answers of `/v1/batches` are read and thrown away undecoded: what the trainer does with them is not what is measured.
"""

from __future__ import annotations

import tempfile
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson
import yaml

from bench.process import Child

if TYPE_CHECKING:
    from types import TracebackType

GROUP_SIZE = 8
CALL_TIMEOUT_S = 120.0
_ERRORS = 300


class Served:
    """A service with one engine, holding `in_flight` requests there.

    Args:
        engine_url: the engine.
        in_flight: requests under way; a multiple of `GROUP_SIZE`.
        max_tokens: of one answer.
    """

    def __init__(self, engine_url: str, in_flight: int, max_tokens: int = 256) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        path = Path(self._folder.name) / "service.yaml"
        path.write_text(yaml.safe_dump(_config(engine_url, in_flight, max_tokens)))
        self._child = Child("rollout_svc", "serve", "--config", path, "--log-level", "warning", ready="service.ready")
        self.url = ""
        self._connection: HTTPConnection | None = None
        self._unacked: list[str] = []

    def __enter__(self) -> Self:
        self._child.__enter__()
        self.url = self._child.ready_line[0].removeprefix("url=")
        self._connection = HTTPConnection(self.url.removeprefix("http://"), timeout=CALL_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            self._connection.close()
        self._child.__exit__(kind, error, trace)
        self._folder.cleanup()

    @property
    def cpu_s(self) -> float:
        """CPU time of the service process so far, seconds."""
        return self._child.cpu_s

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Make one call of the control API on the one warm connection; raises on anything but 2xx."""
        if self._connection is None:
            raise RuntimeError("use it in a with statement")
        self._connection.request(method, path, body=None if body is None else orjson.dumps(body))
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= _ERRORS:
            raise RuntimeError(f"{method} {path}: {response.status}: {answer.decode()}")
        return answer

    def take(self, groups: int) -> int:
        """Take one batch, acknowledging the one before with it, as the clients do; returns the bytes of its body."""
        request = {"step": 0, "groups": groups, "timeout_s": 60, "ack": self._unacked}
        body = self.call("POST", "/v1/batches", request)
        self._unacked = [body[13:45].decode()]  # {"batch_id":"<32 hex>
        return len(body)


def _config(engine_url: str, in_flight: int, max_tokens: int) -> dict[str, Any]:
    return {
        "service": {"port": 0},
        "workers": [{"url": engine_url}],
        "tasks": [
            {
                "name": "bench",
                "prompts": {"source": "bench.workload:prompts"},
                "judger": {"name": "exact"},
                "sampling": {"max_tokens": max_tokens},
            }
        ],
        "trainer": {
            "train_batch_size": in_flight // GROUP_SIZE,
            "prompt_repeat_k": GROUP_SIZE,
            "over_sample_threshold": 0.0,
            "max_batch_per_worker": in_flight,
            "allow_over_concurrency_ratio": 1.0,
            "max_staleness": 2,
        },
    }
