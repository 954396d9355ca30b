"""A publisher of weights for trainers without an event loop.

Invariants:

- It lives in the background loop of its client: one thread for both, started with the first call.
- It is closed before its client is; a client that is closed first takes the loop away under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rollout_svc.weights.publisher import WeightPublisher

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from rollout_svc.rpc.blocking import SyncRolloutClient
    from rollout_svc.weights.senders.protocol import Named

__all__ = ["SyncWeightPublisher"]


class SyncWeightPublisher:
    """The methods of `WeightPublisher`, blocking; use it as a context manager inside that of its client.

    Args:
        client: who asks for the update.
        settings: those of `WeightPublisher`.
    """

    def __init__(self, client: SyncRolloutClient, **settings: Any) -> None:
        self._client = client
        self._publisher = WeightPublisher(client.inner, **settings)
        self._used = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def allocated(self) -> int:
        """See `WeightPublisher.allocated`."""
        return self._publisher.allocated

    @property
    def transfer_s(self) -> float:
        """See `WeightPublisher.transfer_s`."""
        return self._publisher.transfer_s

    def publish(
        self, tensors: Mapping[str, torch.Tensor] | Iterable[Named], version: int, **arguments: Any
    ) -> Mapping[str, Any]:
        """See `WeightPublisher.publish`. Tensors are read in another thread, while the caller waits."""
        self._used = True
        return self._client.run(self._publisher.publish(tensors, version, **arguments))

    def close(self) -> None:
        """Stop listening, and give up the buffers; idempotent, safe before the first call."""
        used, self._used = self._used, False
        if used:
            self._client.run(self._publisher.close())
