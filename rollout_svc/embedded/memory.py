"""The engine's memory, given up and taken back: its weights, and the cache of keys and values.

Invariants:
- Used between steps, where no request is queued or runs; while anything is given up, no step is taken.
- Weights come back bit for bit: they lie in a file without a name, which goes when the process does. Until all of it is
  written nothing has changed; until all of it is read they are given up.
- A tag is given up, or it is not: giving up or taking back what already is so is refused, and changes nothing.
"""

from __future__ import annotations

import ctypes
import tempfile
from typing import IO, TYPE_CHECKING, Any, Final, Literal, get_args

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from rollout_svc.embedded.scheduler import Scheduler

Tag = Literal["weights", "kv_cache"]

TAGS: Final[tuple[Tag, ...]] = get_args(Tag)


class MemoryRefusedError(ValueError):
    """Raised when memory cannot be given up or taken back now; nothing has changed."""


class Memory:
    """What of a scheduler's memory is there. Used by the engine's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._away: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._file: IO[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Memory released={sorted(self._scheduler.released)}>"

    def release(self, tags: Iterable[Tag]) -> None:
        """Give memory up.

        Raises:
            MemoryRefusedError: a request is queued or runs, a tag is given up already, or the file cannot be written.
        """
        scheduler, tags = self._scheduler, frozenset(tags)
        if scheduler.batch.jobs or scheduler.waiting:
            count = len(scheduler.batch.jobs) + len(scheduler.waiting)
            raise MemoryRefusedError(f"the engine is busy: it has {count} requests")
        if again := sorted(tags & scheduler.released):
            raise MemoryRefusedError(f"already given up: {', '.join(again)}")
        if "weights" in tags:
            self._put_away()
        if "kv_cache" in tags:
            scheduler.batch.give_up()
        scheduler.released |= tags
        _trim()

    def resume(self, tags: Iterable[Tag]) -> None:
        """Take memory back.

        Raises:
            MemoryRefusedError: a tag is not given up, or the weights cannot be read.
        """
        scheduler, tags = self._scheduler, frozenset(tags)
        if unknown := sorted(tags - scheduler.released):
            raise MemoryRefusedError(f"not given up: {', '.join(unknown)}")
        if "weights" in tags:
            self._bring_back()
        if "kv_cache" in tags:
            scheduler.batch.take_back()
        scheduler.released -= tags

    def close(self) -> None:
        """Let the file go; what lay in it is lost. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _put_away(self) -> None:
        parameters = dict(self._scheduler.model.named_parameters())
        file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it is open for as long as the weights lie in it
        try:
            for parameter in parameters.values():
                file.write(_bytes(parameter.data.contiguous()))
            file.flush()
        except OSError as error:
            file.close()
            raise MemoryRefusedError(f"the weights cannot be put away: {error}") from error
        self._file = file
        self._away = {name: (parameter.shape, parameter.dtype) for name, parameter in parameters.items()}
        with torch.inference_mode(mode=False):
            for parameter in parameters.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype)

    def _bring_back(self) -> None:
        file = self._file
        assert file is not None  # noqa: S101 - there is one exactly while weights are given up
        file.seek(0)
        found: dict[str, Tensor] = {}
        with torch.inference_mode(mode=False):
            for name, (shape, dtype) in self._away.items():
                found[name] = torch.empty(shape, dtype=dtype)
                view: Any = _bytes(found[name])
                read = file.readinto(view)  # type: ignore[attr-defined]
                if read != len(view):
                    raise MemoryRefusedError(f"the weights cannot be read back: {name} ends after {read} bytes")
            for name, parameter in self._scheduler.model.named_parameters():
                parameter.data = found[name]
        self.close()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _trim() -> None:
    """Give what was freed back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
