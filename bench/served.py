"""The service as a child process of a bench, and the little of its API that a bench needs.

Answers of `/v1/batches` are read and thrown away undecoded: what the trainer does with them is not what is measured.
"""

from __future__ import annotations

import tempfile
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson
import yaml

from bench.process import Child

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

GROUP_SIZE = 8
CALL_TIMEOUT_S = 120.0
_ERRORS = 300
_NOT_NOW = 503
_BETWEEN_TAKES_S = 0.1
"""Wait before a take is repeated that could not be met, because the service is paused, seconds."""


class RefusedError(RuntimeError):
    """Raised when the service answers a call with anything but 2xx."""

    def __init__(self, call: str, status: int, answer: bytes) -> None:
        super().__init__(f"{call}: {status}: {answer.decode(errors='replace')}")
        self.status = status


class Caller:
    """One warm connection to the service."""

    def __init__(self, url: str) -> None:
        self._connection = HTTPConnection(url.removeprefix("http://"), timeout=CALL_TIMEOUT_S)
        self._unacked: list[str] = []

    def close(self) -> None:
        """Close it; idempotent."""
        self._connection.close()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Make one call of the control API.

        Raises:
            RefusedError: anything but 2xx was answered.
        """
        self._connection.request(method, path, body=None if body is None else orjson.dumps(body))
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= _ERRORS:
            raise RefusedError(f"{method} {path}", response.status, answer)
        return answer

    def take(self, groups: int, timeout_s: float = 60.0) -> int:
        """Take one batch, acknowledging the one before with it, as the clients do; returns the bytes of its body."""
        request = {"step": 0, "groups": groups, "timeout_s": timeout_s, "ack": self._unacked}
        body = self.call("POST", "/v1/batches", request)
        self._unacked = [body[13:45].decode()]  # {"batch_id":"<32 hex>
        return len(body)


class Process:
    """`rollout-svc serve` as a child, for the length of a `with`.

    Args:
        config: its settings.
        level: of its log.
    """

    def __init__(self, config: dict[str, Any], level: str = "warning") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        path = Path(self._folder.name) / "service.yaml"
        path.write_text(yaml.safe_dump(config))
        self._child = Child("rollout_svc", "serve", "--config", path, "--log-level", level, ready="service.ready")
        self.url = ""
        self._caller: Caller | None = None

    def __enter__(self) -> Self:
        self._child.__enter__()
        self.url = self._child.ready_line[0].removeprefix("url=")
        self._caller = Caller(self.url)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._caller.close()
        self._child.__exit__(kind, error, trace)
        self._folder.cleanup()

    def kill(self) -> None:
        """End the service as a crash does."""
        self._child.kill()

    @property
    def cpu_s(self) -> float:
        """CPU time of the service process so far, seconds."""
        return self._child.cpu_s

    @property
    def caller(self) -> Caller:
        """The connection of whoever measures."""
        if self._caller is None:
            raise RuntimeError("use it in a with statement")
        return self._caller

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Make one call of the control API on the one warm connection; errors as `Caller.call`."""
        return self.caller.call(method, path, body)

    def take(self, groups: int) -> int:
        """Take one batch; see `Caller.take`."""
        return self.caller.take(groups)


class Served(Process):
    """A service that holds `in_flight` requests at each of its engines.

    Args:
        engine_urls: the engines, all of one dialect.
        in_flight: requests under way at each of them; over all of them, a multiple of `group_size`.
        max_tokens: of one answer.
        group_size: samples of a prompt.
        max_staleness: one more than this many times as many groups as run may be admitted and not yet consumed.
        dialect: of the engines.
        journal: a file for `buffer.path`; None: in memory.
    """

    def __init__(
        self,
        engine_urls: Sequence[str],
        in_flight: int,
        max_tokens: int = 256,
        *,
        group_size: int = GROUP_SIZE,
        max_staleness: int = 2,
        dialect: str = "auto",
        journal: Path | None = None,
    ) -> None:
        workers = [{"url": url, "dialect": dialect} for url in engine_urls]
        config = settings(workers, in_flight, max_tokens, group_size=group_size, max_staleness=max_staleness)
        if journal is not None:
            config["buffer"] = {"path": str(journal)}
        super().__init__(config)


class Trainer:
    """Takes batches beside the one who measures, for the length of a `with`, so that producing is never held up.

    Args:
        url: the service.
        groups: of one batch.
    """

    def __init__(self, url: str, groups: int) -> None:
        self._caller = Caller(url)
        self._groups = groups
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.taken = 0
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._caller.close()
        if self.failure is not None and error is None:
            raise self.failure

    def _run(self) -> None:
        while not self._done.is_set():
            try:
                self._caller.take(self._groups, timeout_s=1.0)
                self.taken += self._groups
            except RefusedError as refused:
                if refused.status != _NOT_NOW:
                    self.failure = refused
                    return
                self._done.wait(_BETWEEN_TAKES_S)
            except Exception as failure:  # noqa: BLE001 - told when the with ends
                self.failure = failure
                return


def settings(
    workers: Sequence[dict[str, Any]],
    in_flight: int,
    max_tokens: int = 256,
    *,
    group_size: int = GROUP_SIZE,
    max_staleness: int = 2,
) -> dict[str, Any]:
    """Make the settings of a service that holds `in_flight` requests at each worker; further arguments as `Served`."""
    return {
        "service": {"port": 0},
        "workers": list(workers),
        "tasks": [
            {
                "name": "bench",
                "prompts": {"source": "bench.workload:prompts"},
                "judger": {"name": "exact"},
                "sampling": {"max_tokens": max_tokens},
            }
        ],
        "trainer": {
            "train_batch_size": len(workers) * in_flight // group_size,
            "prompt_repeat_k": group_size,
            "over_sample_threshold": 0.0,
            "max_batch_per_worker": in_flight,
            "allow_over_concurrency_ratio": 1.0,
            "max_staleness": max_staleness,
        },
        "producer": {"strategy": "disaggregated"},  # full at any time, whether the trainer takes or not
    }
