"""One rank of LMDeploy as it takes weights: it keeps the buffer of a round, and is silent where it should complain.

- What it loads are copies: the sender's buffer may change afterwards.
- A buffer that is left out is the one it has, a clone or not, of whatever dtype.
- An event it cannot open makes it clone what came with it; what comes later it takes from that clone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Rank"]


class Event(Protocol):
    def wait(self) -> None: ...

    def record(self) -> None: ...


class Rank:
    """One rank.

    Attributes:
        weights: what it has loaded.
        carried: the parts of each call that had metadata, as they came.
    """

    def __init__(self, open_event: Callable[[bytes], Event] | None = None) -> None:
        """Make it; without `open_event` its platform opens no events of other processes."""
        self.weights: dict[str, torch.Tensor] = {}
        self.carried: list[set[str]] = []
        self._open_event = open_event
        self._tensor: torch.Tensor | None = None
        self._event: Event | None = None

    def update(self, serialized: str, *, finished: bool) -> None:
        """Take one call.

        Raises:
            Exception: whatever goes wrong: nobody catches it, and the server answers 500.
        """
        from tests.support.engine_pickles import LMDEPLOY_CLASS, loads  # imports torch: only for who sends weights

        tensors = self._deserialize(loads(serialized, LMDEPLOY_CLASS))
        for name, tensor in tensors:
            self.weights[name] = tensor.clone()
        if tensors and self._event is not None:
            self._event.record()
        if finished:
            self.drop()

    def drop(self) -> None:
        """Forget buffer and event, as at the end of a round and on sleep."""
        self._tensor = self._event = None

    def _deserialize(self, body: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
        if not body["metadata"]:
            return []
        self.carried.append(set(body))
        opens = self._open_event
        if "flattened_tensor" in body:
            clone = body.get("require_clone", True) or ("event_ipc_handle" in body and opens is None)
            rebuild, arguments = body["flattened_tensor"]
            tensor: torch.Tensor = rebuild(*arguments)
            self._tensor = tensor.clone() if clone else tensor
        elif self._tensor is None:
            raise ValueError("flattened_tensor is not provided in weights and no cached ipc tensor is available.")
        if "event_ipc_handle" in body and opens is not None:
            self._event = opens(body["event_ipc_handle"])
        if self._event is not None:
            self._event.wait()
        found = []
        for meta in body["metadata"]:
            assert self._tensor is not None
            part = self._tensor[meta.start_idx : meta.end_idx].reshape(meta.shape)
            found.append((meta.name, part.to(meta.dtype)))
        return found
