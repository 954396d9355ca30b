"""The client of the control API for trainers without an event loop: the methods of `RolloutClient`, blocking.

Invariants:

- A call blocks its own thread only: each runs in a loop of the client's own, in a background thread.
- What a call takes, answers and raises is `RolloutClient`'s to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollout_svc.rpc.background import BackgroundLoop
from rollout_svc.rpc.client import Ack, Json, RolloutClient

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping
    from types import TracebackType

    import numpy as np

__all__ = ["SyncRolloutClient"]

T = TypeVar("T")


class SyncRolloutClient:
    """The methods of `RolloutClient`, blocking: for trainers without an event loop, from any thread.

    It runs a loop of its own in a background thread, started with the first call; so it also works in a thread
    that has a running loop, which it then blocks. Use it as a context manager or with `close`.

    Args:
        url: address of the service.
        token: bearer token, where the service wants one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._client = RolloutClient(url, token)
        self._background = BackgroundLoop()

    def __repr__(self) -> str:
        state = "open" if self._background.is_open else "closed"
        return f"<SyncRolloutClient {self._client.url} {state} unacked={self.unacked}>"

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._client.url

    @property
    def unacked(self) -> str | None:
        """The batch that the next take acknowledges, or None."""
        return self._client.unacked

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inner(self) -> RolloutClient:
        """The client that does the work; its calls are for `run` alone."""
        return self._client

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call in the background, and wait for it: for what is built on `inner`."""
        return self._run(call)

    def close(self) -> None:
        """Close the connections and end the thread; idempotent, safe before the first call."""
        self._background.close(self._client.close)

    def ready(self) -> bool:
        """See `RolloutClient.ready`."""
        return self._run(self._client.ready())

    def status(self) -> Json:
        """See `RolloutClient.status`."""
        return self._run(self._client.status())

    def stuck(self, older_than_s: float | None = None) -> Json:
        """See `RolloutClient.stuck`."""
        return self._run(self._client.stuck(older_than_s))

    def memory(self) -> Json:
        """See `RolloutClient.memory`."""
        return self._run(self._client.memory())

    def pause(self, **arguments: Any) -> Json:
        """See `RolloutClient.pause`."""
        return self._run(self._client.pause(**arguments))

    def resume(self, ticket: int | None = None, *, weight_version: int | None = None) -> Json:
        """See `RolloutClient.resume`."""
        return self._run(self._client.resume(ticket, weight_version=weight_version))

    def take_batch(
        self, step: int, groups: int, timeout_s: float = 60.0, ack: Ack = "auto", *, tensors: bool = False
    ) -> Json:
        """See `RolloutClient.take_batch`."""
        return self._run(self._client.take_batch(step, groups, timeout_s, ack, tensors=tensors))

    def take_experts(self, batch: Json) -> dict[str, np.ndarray[Any, Any]]:
        """See `RolloutClient.take_experts`."""
        return self._run(self._client.take_experts(batch))

    def ack(self, batch_id: str) -> Json:
        """See `RolloutClient.ack`."""
        return self._run(self._client.ack(batch_id))

    def put_prompts(self, task: str, prompts: Iterable[Mapping[str, Any]]) -> Json:
        """See `RolloutClient.put_prompts`."""
        return self._run(self._client.put_prompts(task, prompts))

    def checkpoint(self, path: str, step: int, *, ack: Ack = "auto") -> Json:
        """See `RolloutClient.checkpoint`."""
        return self._run(self._client.checkpoint(path, step, ack=ack))

    def evaluate(self, task: str, prompts: Iterable[Mapping[str, Any]], **arguments: Any) -> Json:
        """See `RolloutClient.evaluate`."""
        return self._run(self._client.evaluate(task, prompts, **arguments))

    def update_weights(self, version: int, source: Mapping[str, Any], **arguments: Any) -> Json:
        """See `RolloutClient.update_weights`."""
        return self._run(self._client.update_weights(version, source, **arguments))

    def concurrency(self) -> Json:
        """See `RolloutClient.concurrency`."""
        return self._run(self._client.concurrency())

    def set_concurrency(self, **arguments: Any) -> Json:
        """See `RolloutClient.set_concurrency`."""
        return self._run(self._client.set_concurrency(**arguments))

    def workers(self) -> list[Json]:
        """See `RolloutClient.workers`."""
        return self._run(self._client.workers())

    def add_worker(self, url: str | None = None, **settings: Any) -> Json:
        """See `RolloutClient.add_worker`."""
        return self._run(self._client.add_worker(url, **settings))

    def remove_worker(self, worker_id: str) -> Json:
        """See `RolloutClient.remove_worker`."""
        return self._run(self._client.remove_worker(worker_id))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._background.run(call)
