"""The routed experts of a batch, fetched: one call per sample, where they are not in the batch itself.

Invariant: a batch whose lease has ended is an error, never one without experts.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from rollout_svc.errors import NotFound
from rollout_svc.packing import MEDIA_TYPE
from rollout_svc.packing.reading import experts_of, read_experts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from rollout_svc.rpc.wire import Wire

__all__ = ["fetch_experts"]

_AT_ONCE: Final = 4  # calls under way: what a connection brings is whole in memory before it is read


async def fetch_experts(wire: Wire, batch: Mapping[str, Any], timeout_s: float) -> dict[str, np.ndarray[Any, Any]]:
    """Return routed experts by sample id, of the samples that have some.

    Args:
        wire: to the service that lent the batch.
        batch: as the client returned it, in either form.
        timeout_s: bound of each call.

    Raises:
        NotFound: it is not lent any more.
    """
    if "tensors" in batch:
        return experts_of(batch)
    turns = asyncio.Semaphore(_AT_ONCE)

    async def fetch(sample_id: str) -> np.ndarray[Any, Any] | None:
        async with turns:
            try:
                path = f"/v1/tensors/{quote(sample_id, safe='')}"
                body = await wire.fetch("GET", path, None, timeout_s, MEDIA_TYPE)
            except NotFound as error:
                if error.type == "no_experts":
                    return None
                raise
            return await asyncio.to_thread(read_experts, body)

    names = [sample["sample_id"] for group in batch["groups"] for sample in group["samples"]]
    calls = [asyncio.ensure_future(fetch(name)) for name in names]
    try:
        found = await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()  # of those that are left where one was refused
    return {name: experts for name, experts in zip(names, found, strict=True) if experts is not None}
