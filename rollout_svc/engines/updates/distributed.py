"""Weights broadcast in a `torch.distributed` group that the engine joins; `weights/senders/distributed.py` sends them.

| engine | begins with | each bucket | ends with |
|---|---|---|---|
| built-in | `/begin_weight_update`, manifest | staged | `/end_weight_update`, version: swapped in at once |
| SGLang | `/begin_weight_update` (404 before 2026-06: there is none) | label `loading N`, then loaded as it comes, flat | `/end_weight_update`, then the label |
| vLLM | with the first bucket: label `loading N`, `/start_weight_update` | loaded as it comes, tensor by tensor | `/finish_weight_update`, version |
| LMDeploy | nothing | loaded as it comes, flat | the last call, `finished` |

Invariants:

- The calls that join and that receive block until the trainer has done its part: both are under way at the same time.
- The built-in engine is as it was until `close`; the others are touched from before their first bucket.
- An update that failed takes the engine's place in the group along; the trainer makes another for the next one.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import orjson

from rollout_svc.engines.calls import LOADING, Call, Reply
from rollout_svc.engines.lmdeploy import LMDeployDialect
from rollout_svc.engines.parsing import control_body
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.engines.updates.protocol import Ask, Opening
from rollout_svc.engines.updates.sglang_session import ALL, SGLangSession, label_call
from rollout_svc.engines.updates.vllm import FINISH, end_remains
from rollout_svc.engines.vllm import VLLMDialect
from rollout_svc.errors import WorkerFailure

__all__ = ["LMDeployDistributedUpdate", "SGLangDistributedUpdate", "VLLMDistributedUpdate"]

_OWN: Final = "timeout_s"  # of a group: known to the built-in engine alone
_GROUP: Final = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
_TENSORS: Final = ("names", "dtypes", "shapes")


class _GroupUpdate:
    """What SGLang and LMDeploy have in common: the names of the group's routes, and flat buckets."""

    __slots__ = ("_dialect", "_group", "touched")

    def __init__(self, dialect: SGLangDialect | LMDeployDialect) -> None:
        self.touched = False
        self._dialect = dialect
        self._group: str | None = None

    async def _post(self, ask: Ask, path: str, body: Mapping[str, Any]) -> None:
        self._done(await ask(_call(path, body)), path)

    def _done(self, reply: Reply, path: str) -> None:
        """200, and `success` not false."""
        self._dialect.parse_done(reply)
        if reply.body[:1] == b"{" and (body := control_body(reply)).get("success") is False:
            raise WorkerFailure("refused", f"{path}: {body.get('message')}")

    async def _leave(self, ask: Ask, names: Any) -> None:
        """Leave groups that it may be in: one that it is not in is refused, and that is as well."""
        for name in names if isinstance(names, list) else ():
            with suppress(WorkerFailure):
                await self._post(ask, "/destroy_weights_update_group", {"group_name": name})

    async def _join(self, ask: Ask, body: Mapping[str, Any], *also: str) -> None:
        group = _group_of(body)
        self._group = str(group["group_name"])
        if body.get("join"):
            await self._post(ask, "/init_weights_update_group", {key: group[key] for key in (*_GROUP, *also)})

    def _bucket(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            tensors = {key: body[key] for key in _TENSORS}
        except KeyError as error:
            raise WorkerFailure("bad_body", f"the publisher: a bucket without {error}") from error
        return {**tensors, "group_name": self._group, "load_format": "flattened_bucket"}

    async def _drop(self, ask: Ask) -> None:
        if self._group is not None:
            await self._leave(ask, [self._group])


class SGLangDistributedUpdate(_GroupUpdate):
    """SGLang's side of one update, or the built-in engine's, which says that it has this way and stages."""

    __slots__ = ("_session", "_stages", "_version")

    def __init__(self) -> None:
        super().__init__(SGLangDialect())
        self._stages = False
        self._session = SGLangSession()
        self._version = 0

    async def open(self, ask: Ask, opening: Opening) -> None:
        """Open a session; the built-in engine checks what will come, whole, before anything is sent."""
        self._version = opening.version
        said = control_body(await ask(Call("GET", "/server_info"))).get("weight_transports")
        self._stages = isinstance(said, list) and "distributed" in said
        await self._leave(ask, opening.own.get("leave"))
        body = dict(ALL)
        if self._stages:
            body = {"check_finite": opening.check_finite}
            if opening.manifest is not None:
                body["manifest"] = opening.manifest
        begun = await self._session.begin(ask, body, ours_alone=self._stages)
        if begun is not None:
            self._done(begun, "/begin_weight_update")

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket received, at the same time by all ranks."""
        await self._join(ask, body, *((_OWN,) if self._stages else ()))
        if not self._stages and not self.touched:
            self.touched = True
            await self._label(ask, f"{LOADING}{self._version}")
        more = {"flush_cache": False, "abort_all_requests": False}
        await self._post(ask, "/update_weights_from_distributed", self._bucket(body) | more)

    async def close(self, ask: Ask, version: int) -> None:
        """End the session, and label."""
        if self._stages:
            await self._post(ask, "/end_weight_update", {"weight_version": str(version)})
            return
        if not self.touched:
            raise WorkerFailure("empty", "no weights came")
        if (ended := await self._session.end(ask)) is not None:
            self._done(ended, "/end_weight_update")
        await self._label(ask, str(version))
        self.touched = False

    async def revert(self, ask: Ask, version: int) -> None:
        """Swap back what was swapped out, and label it: the built-in engine alone kept it."""
        if not self._stages:
            raise WorkerFailure("cannot", "it keeps no weights to go back to")
        await self._post(ask, "/revert_weight_update", {"weight_version": str(version)})

    async def abandon(self, ask: Ask) -> None:
        """Forget what was staged, or end the session: one that stays open refuses the next."""
        with suppress(WorkerFailure):
            if not self._stages:
                await self._session.abandon(ask)
            elif self._session.is_open:
                await self._post(ask, "/abandon_weight_update", {})
        await self._drop(ask)

    async def _label(self, ask: Ask, label: str) -> None:
        call = label_call(label)
        self._done(await ask(call), call.path)


class LMDeployDistributedUpdate(_GroupUpdate):
    """LMDeploy's side of one update."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(LMDeployDialect())

    async def open(self, ask: Ask, opening: Opening) -> None:
        """It has no session: only groups that are no more are left."""
        await self._leave(ask, opening.own.get("leave"))

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket received."""
        await self._join(ask, body)
        self.touched = True
        await self._post(ask, "/update_weights_from_distributed", self._bucket(body) | {"finished": False})

    async def close(self, ask: Ask, version: int) -> None:  # noqa: ARG002 - it has no labels
        """Run what it runs after a load; nothing is sent for it."""
        if not self.touched:
            raise WorkerFailure("empty", "no weights came")
        nothing: dict[str, Any] = {key: [] for key in _TENSORS}
        body = nothing | {"group_name": self._group, "load_format": None, "finished": True}
        await self._post(ask, "/update_weights_from_distributed", body)
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """Leave the group."""
        await self._drop(ask)


class VLLMDistributedUpdate:
    """vLLM's side of one update, by its backend `nccl`.

    From `/start_weight_update` to `/finish_weight_update` it has no weights at all, and nothing says so but its label.
    """

    __slots__ = ("_begun", "_dialect", "_started", "_version", "touched")

    def __init__(self) -> None:
        self.touched = False
        self._begun = False
        self._started = False
        self._dialect = VLLMDialect()
        self._version = 0

    async def open(self, ask: Ask, opening: Opening) -> None:
        """End what another update left; groups that are no more are forgotten there when another is joined."""
        self._version = opening.version
        self.touched = await end_remains(ask)

    async def load(self, ask: Ask, body: Mapping[str, Any]) -> None:
        """Have one bucket received; before the first one it gives up the weights that it has."""
        if body.get("join"):
            await self._post(ask, "/init_weight_transfer_engine", {"init_info": _init_info(_group_of(body))})
        if not self._begun:
            self._begun = self.touched = True
            await self._post(ask, "/update_weight_version", {"new_version": f"{LOADING}{self._version}"})
            self._started = True  # one whose answer is lost is to be ended too
            await self._post(ask, "/start_weight_update", None)
        try:
            info = {"names": body["names"], "dtype_names": body["dtypes"], "shapes": body["shapes"]}
        except KeyError as error:
            raise WorkerFailure("bad_body", f"the publisher: a bucket without {error}") from error
        await self._post(ask, "/update_weights", {"update_info": info})

    async def close(self, ask: Ask, version: int) -> None:
        """Have it make its weights whole, and label them."""
        if not self._begun:
            raise WorkerFailure("empty", "no weights came")
        await self._post(ask, "/finish_weight_update", {"weight_version": str(version)})
        self.touched = False

    async def abandon(self, ask: Ask) -> None:
        """End the round, so that the next one can begin; its weights are of no version, and its label says so."""
        if self._started:
            self._started = False
            await ask(FINISH)

    async def _post(self, ask: Ask, path: str, body: Mapping[str, Any] | None) -> None:
        self._dialect.parse_done(await ask(_call(path, body)))


def _call(path: str, body: Mapping[str, Any] | None) -> Call:
    return Call("POST", path, None if body is None else orjson.dumps(body), admin=True)


def _group_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    group = body.get("group")
    if not isinstance(group, dict) or not {*_GROUP, _OWN} <= group.keys():
        raise WorkerFailure("bad_body", f"the publisher: expected a group to join, not {group!r:.200}")
    return group


def _init_info(group: Mapping[str, Any]) -> dict[str, Any]:
    """How its workers meet the trainer: by an id where there is one, else by an address; both are refused."""
    ranks = {"rank_offset": group["rank_offset"], "world_size": group["world_size"]}
    if "unique_id" in group:
        return {**ranks, "nccl_unique_id_b64": group["unique_id"]}
    return {**ranks, "master_address": group["master_address"], "master_port": group["master_port"]}
