"""An update by an engine's own protocol, call by call: what opens it, the buckets one after the other, what closes it.

Invariants:

- One bucket is written while none is read: the next is flattened once the last was answered.
- SGLang's update is closed whatever happens, also where the caller is cancelled: an engine left open refuses the next
  one. One that somebody else left open is closed first.
- A bucket that is not answered 200 ends the update: what the engine has by then is of two versions, and only another
  whole update makes it good. The caller keeps it from traffic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from rollout_svc.engines.calls import Call, Reply
from rollout_svc.engines.parsing import check_status
from rollout_svc.engines.sglang import SGLangDialect
from rollout_svc.weights.bucket import FlattenedBucket
from rollout_svc.weights.payloads import sglang
from rollout_svc.weights.payloads.lmdeploy import LMDeployRound
from rollout_svc.weights.threads import off_loop

if TYPE_CHECKING:
    import torch

__all__ = ["Ask", "update_lmdeploy", "update_sglang"]

Named = tuple[str, "torch.Tensor"]
Ask = Callable[[Call], Awaitable[Reply]]
"""Makes a call at the engine, in bounded time; raises WorkerFailure where it is not answered."""

_NO_SUCH_ROUTE: Final = frozenset({404, 405})
_REFUSED: Final = 400


async def update_sglang(ask: Ask, buckets: Iterable[Sequence[Named]], version: int, *, ranks: int = 1) -> None:
    """Load buckets into an SGLang engine, and label its weights with the last.

    Args:
        ask: makes a call.
        buckets: of named tensors, any dtypes, as `weights.bucket.cut` cuts them; at least one.
        version: of the weights.
        ranks: tensor-parallel ranks of the engine.

    Raises:
        WorkerFailure: the engine refused, or did not answer; what it has may be of two versions.
        ValueError: there is no bucket; the engine was not asked anything.
    """
    coming = _with_last(buckets)
    first = next(coming, None)
    if first is None:
        raise ValueError("expected at least one bucket")
    sessions = True  # until it is known that it has none: a begin whose answer was lost is to be closed too
    done = SGLangDialect().parse_done
    try:
        sessions = await _begin_sglang(ask)
        following: tuple[Sequence[Named], bool] | None = first
        while following is not None:
            tensors, last = following
            # Held until the answer: the payloads say where it lies.
            bucket = await off_loop(partial(FlattenedBucket.pack, tensors, "bytes"))
            payloads = [await off_loop(partial(sglang.payload, bucket)) for _ in range(ranks)]
            done(await ask(sglang.update_call(payloads, version=version if last else None)))
            following = next(coming, None)
    except BaseException:
        if sessions:
            await asyncio.gather(asyncio.shield(_close(ask)), return_exceptions=True)
        raise
    if sessions:
        done(await ask(sglang.end()))


async def update_lmdeploy(ask: Ask, sender: LMDeployRound, buckets: Iterable[Sequence[Named]]) -> None:
    """Load buckets into an LMDeploy engine, which says of no weights what version they are.

    Args:
        ask: makes a call.
        sender: this engine's, from one update to the next.
        buckets: of named tensors, each of one dtype; at least one.

    Raises:
        WorkerFailure: the engine failed, or did not answer; what it has may be of two versions.
        ValueError: there is no bucket; the engine was not asked anything.
    """
    sent = False
    for tensors, last in _with_last(buckets):
        try:
            call = await off_loop(partial(sender.bucket, tensors, finished=last))
            check_status(await ask(call))
        except BaseException:
            sender.failed()
            raise
        sender.answered()
        sent = True
    if not sent:
        raise ValueError("expected at least one bucket")


async def _begin_sglang(ask: Ask) -> bool:
    """Open the update where the engine has such a thing; whether it has."""
    reply = await ask(sglang.begin())
    if reply.status in _NO_SUCH_ROUTE:
        return False
    if reply.status == _REFUSED:  # somebody left one open
        await _close(ask)
        reply = await ask(sglang.begin())
    SGLangDialect().parse_done(reply)
    return True


async def _close(ask: Ask) -> None:
    await ask(sglang.end())


def _with_last(buckets: Iterable[Sequence[Named]]) -> Iterator[tuple[Sequence[Named], bool]]:
    """Each bucket, and whether it is the last; one is looked ahead."""
    coming = iter(buckets)
    held = next(coming, None)
    while held is not None:
        following = next(coming, None)
        yield held, following is None
        held = following
