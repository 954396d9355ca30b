"""Pickles that an engine's own protocol demands: they name its classes, which need not be installed here.

A trainer has no reason to install the engine it feeds, and importing one takes many seconds. So a stand-in with the
same fields is written under the name the receiver looks up; tensors are written as `torch.multiprocessing` writes them.

Invariants:

- Nothing is imported to be named, and nothing is ever unpickled in this package.
- A rebuilding function of torch's is written under torch's name, whatever it was replaced by in this process: another
  library's patch (SGLang's is the common one) would name a module that the receiver may not have.
- Tensors on the CPU travel by file name: a descriptor can only be fetched from this very process, by its children.
- What is written refers to the tensor's memory: the sender keeps the tensor until the receiver has answered. Each
  pickle is for one receiver, once: torch counts them.
"""

from __future__ import annotations

import base64
import copyreg
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

__all__ = ["Named", "dumps", "handle_of"]

Named = Mapping[Any, tuple[str, str]]
"""Class or function -> the module and the name it is written under."""
Reduction = tuple[Callable[..., Any], tuple[Any, ...]]

PROTOCOL: Final = 4
"""Of what is written: read by every Python an engine runs on."""
DEVICE_ARGUMENT: Final = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the device."""
_TORCH: Final = "torch.multiprocessing.reductions"
_SHARING = threading.RLock()  # the strategy is the process's; a reducer takes it again


def dumps(payload: Any, names: Named, *, by_uuid: bool = False) -> str:
    """Pickle for an engine; base64.

    Args:
        payload: of builtins, stand-ins, dtypes, shapes and tensors.
        names: what the stand-ins are written as.
        by_uuid: name the device of a tensor by its UUID: the receiver may count devices differently, and looks it up.
    """
    import torch  # noqa: PLC0415 - takes seconds to import: only for who uses it
    from torch.multiprocessing import reductions  # noqa: PLC0415

    sink = io.BytesIO()
    written = {**names, reductions.rebuild_cuda_tensor: (_TORCH, "rebuild_cuda_tensor")}
    with _shared_by_name():
        _Pickler(sink, written, {torch.Tensor: _reduce_by_uuid} if by_uuid else {}).dump(payload)
    return base64.b64encode(sink.getvalue()).decode()


def handle_of(tensor: torch.Tensor) -> Reduction:
    """How a receiver rebuilds a tensor where it lies: torch's function, and its arguments."""
    from torch.multiprocessing import reductions  # noqa: PLC0415

    with _shared_by_name():
        function, arguments = reductions.reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    return function, tuple(arguments)


def _reduce_by_uuid(tensor: torch.Tensor) -> Reduction:
    import torch  # noqa: PLC0415

    function, arguments = handle_of(tensor)
    if tensor.is_cuda:
        uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
    return function, arguments


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Have torch share memory of the CPU by file name meanwhile."""
    import torch.multiprocessing as sharing  # noqa: PLC0415

    with _SHARING:
        before = sharing.get_sharing_strategy()  # type: ignore[no-untyped-call]
        sharing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            sharing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


class _Pickler(pickle._Pickler):  # noqa: SLF001 - the one in C looks every name up, and so imports its module
    """Writes chosen globals under names that are not looked up, and the rest as `ForkingPickler` does."""

    def __init__(self, sink: io.BytesIO, names: Named, reducers: Mapping[type, Callable[[Any], Any]]) -> None:
        super().__init__(sink, PROTOCOL)
        shared: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # noqa: SLF001 - torch's are there
        self.dispatch_table = {**copyreg.dispatch_table, **shared, **reducers}
        self._names = names

    def reducer_override(self, obj: Any) -> Any:
        """Have what has a name of ours written by `save_global`; functions would bypass it."""
        if isinstance(obj, type | FunctionType) and obj in self._names:
            return self._names[obj][1]
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Write a global; one of ours without looking for it."""
        found = self._names.get(obj) if isinstance(obj, type | FunctionType) else None
        if found is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        for part in found:
            self.save(part)  # type: ignore[attr-defined]
        self.write(pickle.STACK_GLOBAL)  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]
