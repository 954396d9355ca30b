"""The client of the control API; `blocking` has the same methods for trainers without an event loop.

Invariants:

- An answer is the decoded JSON of the contract, a plain dict; an error body is raised as its class of
  `rollout_svc.errors`; no answer at all is `Unreachable`. Nothing above sees an aiohttp error.
- Every call has a bound: the time that it grants the service, where it grants one, and a margin for the way.
- A batch is acknowledged with the next take of another step, unless the caller says otherwise. It stays
  unacknowledged until a take has succeeded, so a take that fails may be repeated as it is.
- Taking the same step again never acknowledges that step's batch: it asks for the batch once more.
- No call is retried here: whether a lost call took effect is for the caller to ask.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, Self
from urllib.parse import quote, urlencode

from rollout_svc.errors import Unreachable
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.reading import read_batch
from rollout_svc.rpc import arguments
from rollout_svc.rpc.fetching import fetch_experts
from rollout_svc.rpc.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    import numpy as np

__all__ = ["Ack", "Json", "RolloutClient"]

Json = dict[str, Any]
Ack = Literal["auto"] | list[str] | None

MARGIN_S: Final = 10.0
"""Added to the time a call grants the service: connecting, and the body of a large batch."""
CALL_TIMEOUT_S: Final = 30.0
"""Bound of calls that the service answers at once."""
UNBOUNDED_WORK_TIMEOUT_S: Final = 600.0
"""Bound where the service's own settings decide how long the work takes: a pause, loading weights."""


class RolloutClient:
    """Talks to one service; use it in one event loop, as a context manager or with `close`.

    Args:
        url: address of the service, `http://127.0.0.1:8700`.
        token: bearer token, where the service wants one.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._wire = Wire(url, token)
        self._last_batch: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<RolloutClient {self.url} {'open' if self._wire.is_open else 'closed'} unacked={self.unacked}>"

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._wire.url

    @property
    def unacked(self) -> str | None:
        """The batch that the next take acknowledges, or None."""
        return self._last_batch[0] if self._last_batch else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the last batch stays unacknowledged. Idempotent, and the client may be used again."""
        await self._wire.close()

    async def ready(self) -> bool:
        """Say whether the service takes work; False too when it cannot be reached."""
        try:
            status, _, _ = await self._wire.send("GET", "/readyz", None, CALL_TIMEOUT_S)
        except Unreachable:
            return False
        return status == HTTPStatus.OK

    async def status(self) -> Json:
        """Return what the service is doing: state, ticket, weight version, lanes, workers, buffer, ledger, plan."""
        return await self._call("GET", "/v1/status")

    async def stuck(self, older_than_s: float | None = None) -> Json:
        """Return who has been under way for longer than that (None: than a pause may take), since when, and where."""
        query = "" if older_than_s is None else "?" + urlencode({"older_than_s": older_than_s})
        return await self._call("GET", "/v1/stuck" + query)

    async def memory(self) -> Json:
        """Return what every process has, what grows with the steps, and what is to blame."""
        return await self._call("GET", "/v1/memory")

    async def pause(
        self,
        *,
        mode: str | None = None,
        deadline_s: float | None = None,
        lanes: Sequence[str] | None = None,
        if_ticket: int | None = None,
        kv: str | None = None,
        offload: Sequence[str] | None = None,
    ) -> Json:
        """Stop the stage; returns the report, at the latest by `deadline_s` (None: the service's setting).

        Raises:
            Conflict: `if_ticket` is not the current ticket; `detail` holds both.
        """
        body = arguments.given(
            mode=mode, deadline_s=deadline_s, lanes=lanes, if_ticket=if_ticket, kv=kv, offload=offload
        )
        return await self._call("POST", "/v1/pause", body, timeout_s=_pause_bound(deadline_s))

    async def resume(self, ticket: int | None = None, *, weight_version: int | None = None) -> Json:
        """Let the stage go on; returns its status.

        Args:
            ticket: the pause this ends; an old one is refused.
            weight_version: asserted, not set: every worker in traffic must report it.

        Raises:
            Conflict: an old ticket, or another weight version.
        """
        body = arguments.given(ticket=ticket, weight_version=weight_version)
        return await self._call("POST", "/v1/resume", body, timeout_s=UNBOUNDED_WORK_TIMEOUT_S)

    # -- batches and prompts ---------------------------------------------------------------------------------

    async def take_batch(
        self, step: int, groups: int, timeout_s: float = 60.0, ack: Ack = "auto", *, tensors: bool = False
    ) -> Json:
        """Lease a batch of finished groups.

        Args:
            step: trainer steps done so far; the same step again, while leased, gives the same batch.
            groups: how many groups.
            timeout_s: how long the service may wait for them.
            ack: `auto` acknowledges the batch taken before; a list, exactly those; None, nothing: acknowledging
                that batch is then the caller's.
            tensors: as padded torch tensors under `tensors`, with dtypes and shapes as in `rollout_svc.packing.batch`;
                `groups` and `samples` then hold what is in none of them.

        Raises:
            NotNow: it cannot be filled in time; `type` is `not_enough`, `paused`, `exhausted` or `failed`.
        """
        ids = self._to_ack(step) if ack == "auto" else (ack or ())
        body = arguments.batch(step, groups, timeout_s, ids)
        if tensors:
            raw = await self._wire.fetch("POST", "/v1/batches", body, timeout_s + MARGIN_S, MEDIA_TYPE)
            batch = await asyncio.to_thread(read_batch, raw)  # the first time, torch is imported
        else:
            batch = await self._call("POST", "/v1/batches", body, timeout_s=timeout_s + MARGIN_S)
        self._last_batch = (str(batch["batch_id"]), step)
        return batch

    async def take_experts(self, batch: Json) -> dict[str, np.ndarray[Any, Any]]:
        """Return the routed experts of a batch that `take_batch` gave, by sample id, of those samples that have some.

        They are in a batch of tensors already; those of another are fetched, a few at a time. Ask before its ack.

        Returns:
            `(tokens - 1, moe_layers, top_k)` each, uint8 or uint16.

        Raises:
            NotFound: the batch is not lent any more.
        """
        return await fetch_experts(self._wire, batch, CALL_TIMEOUT_S + MARGIN_S)

    async def ack(self, batch_id: str) -> Json:
        """Acknowledge a batch: its groups are consumed for good.

        Raises:
            Conflict: its lease has expired and its groups went back.
        """
        answer = await self._call("POST", f"/v1/batches/{quote(batch_id, safe='')}/ack", {})
        if self.unacked == batch_id:
            self._last_batch = None
        return answer

    async def put_prompts(self, task: str, prompts: Iterable[Mapping[str, Any]]) -> Json:
        """Hand prompts to a task that takes them; returns how many were new."""
        body = arguments.prompts(task, prompts)
        return await self._call("POST", "/v1/prompts", body, timeout_s=CALL_TIMEOUT_S + MARGIN_S)

    async def checkpoint(self, path: str, step: int, *, ack: Ack = "auto") -> Json:
        """Write a snapshot of everything that must survive, beside the trainer's own; works paused and running.

        Args:
            path: a file on the service's machine: a new one, or a snapshot, which is replaced.
            step: trainer steps done.
            ack: `auto` acknowledges the batch taken before, if it was taken for an earlier step: its work is in the
                weights that go with the snapshot; a list, exactly those; None, nothing.

        Returns:
            `path`, `step`, `bytes` of the file, `groups` and `samples` in it, `seconds` it took.

        Raises:
            Conflict: `no_journal`: the service has no `buffer.path`; `exists`: there is a file, and it is no snapshot.
            NotNow: `checkpoint_failed`: the disk is full; nothing is left of it.
        """
        ids = self._to_ack_before(step) if ack == "auto" else (ack or ())
        body = arguments.checkpoint(path, step, ids)
        answer = await self._call("POST", "/v1/checkpoints", body, timeout_s=UNBOUNDED_WORK_TIMEOUT_S)
        if self.unacked in body.get("ack", ()):
            self._last_batch = None
        return answer

    async def evaluate(
        self,
        task: str,
        prompts: Iterable[Mapping[str, Any]],
        *,
        sampling: Mapping[str, Any] | None = None,
        version: int | None = None,
        timeout_s: float = 600.0,
    ) -> Json:
        """Have prompts answered and judged in lane `eval`, once each; returns their groups, in order.

        Args:
            task: whose agent, judger and sampling.
            prompts: prompt lines, as a file has them.
            sampling: keys laid over the task's sampling.
            version: the weight version it is for; None: the fleet's when it begins.
            timeout_s: seconds for all of it.

        Raises:
            Conflict: `weight_version`, the fleet is at another, or `version_changed`, it left it meanwhile.
        """
        body = arguments.evaluation(task, prompts, sampling=sampling, version=version, timeout_s=timeout_s)
        return await self._call("POST", "/v1/evaluations", body, timeout_s=timeout_s + MARGIN_S)

    async def update_weights(
        self,
        version: int,
        source: Mapping[str, Any],
        *,
        pause: Mapping[str, Any] | None = None,
        force: bool = False,
        timeout_s: float = UNBOUNDED_WORK_TIMEOUT_S,
    ) -> Json:
        """Bring every worker to a weight version.

        Args:
            version: trainer steps whose weights these are.
            source: `{"kind": "disk", "path": ...}`, or `{"kind": "external"}` when the trainer has moved them itself.
            pause: arguments of a pause to be made around it; None: the stage is paused already.
            force: also where the fleet has this version already, or a later one.
            timeout_s: how long to wait for the answer.

        Raises:
            BadRequest: the files are not whole, or the version is none; nothing was stopped.
            Conflict: the stage is not paused, or the version is not greater than the fleet's.
            NotNow: some worker failed; `detail` says which, and the stage stays paused.
        """
        body = arguments.weights(version, source, pause=pause, force=force)
        return await self._call("POST", "/v1/weights", body, timeout_s=timeout_s + MARGIN_S)

    async def concurrency(self) -> Json:
        """Return the plan in force."""
        return await self._call("GET", "/v1/concurrency")

    async def set_concurrency(
        self, *, trainer: Mapping[str, Any] | None = None, limits: Mapping[str, int] | None = None
    ) -> Json:
        """Derive the plan from the trainer's numbers, or cap single workers; returns the plan in force."""
        return await self._call("PUT", "/v1/concurrency", arguments.given(trainer=trainer, limits=limits))

    async def workers(self) -> list[Json]:
        """Return the fleet: the records of `status["workers"]`."""
        answer: list[Json] = (await self._call("GET", "/v1/workers"))["workers"]
        return answer

    async def add_worker(self, url: str | None = None, **settings: Any) -> Json:
        """Add an engine to the fleet; `settings` are the keys of a worker in the configuration, `launch` for one."""
        body = arguments.worker(url, settings)
        return await self._call("POST", "/v1/workers", body, timeout_s=UNBOUNDED_WORK_TIMEOUT_S)

    async def remove_worker(self, worker_id: str) -> Json:
        """Take an engine out of the fleet; what it runs may finish first."""
        path = f"/v1/workers/{quote(worker_id, safe='')}"
        return await self._call("DELETE", path, timeout_s=UNBOUNDED_WORK_TIMEOUT_S)

    def _to_ack(self, step: int) -> list[str]:
        if self._last_batch is None or self._last_batch[1] == step:
            return []
        return [self._last_batch[0]]

    def _to_ack_before(self, step: int) -> list[str]:
        return [self._last_batch[0]] if self._last_batch is not None and self._last_batch[1] < step else []

    async def _call(self, method: str, path: str, body: Json | None = None, timeout_s: float = CALL_TIMEOUT_S) -> Json:
        return await self._wire.call(method, path, body, timeout_s)


def _pause_bound(deadline_s: float | None) -> float:
    return UNBOUNDED_WORK_TIMEOUT_S if deadline_s is None else deadline_s + MARGIN_S
