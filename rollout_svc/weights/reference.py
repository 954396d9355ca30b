"""Whether a checkpoint has the tensors that its model has, as far as that can be known here.

Known are the tensors of the last checkpoint that all of an update came from; before the first those in the folder that
an engine says it serves, where that is on this machine.

Invariants:

- Only what is certain is a problem: where nothing is known, or one of the two is in another format than safetensors,
  nothing is said.
- What engines leave aside is no difference: the output weights of a model that ties them, buffers that are computed.
- What is remembered is what was read when it was checked: checkpoints are deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from rollout_svc.weights.checkpoint import tensors_of
from rollout_svc.weights.names import Kind, differences, listed

__all__ = ["Checked", "Reference"]

_CONFIG: Final = "config.json"
_TIED: Final = "lm_head.weight"
_COMPUTED: Final = "rotary_emb.inv_freq"
_log = structlog.get_logger("weights")


class Checked(NamedTuple):
    """What was found in a checkpoint.

    Attributes:
        path: where it is.
        tensors: that it has; None: not known.
        problems: what it lacks, or has that it should not.
    """

    path: str
    tensors: Mapping[str, Kind] | None
    problems: list[str]


class Reference:
    """The tensors that a checkpoint has to have; see the module's invariants."""

    def __init__(self) -> None:
        self._last: Checked | None = None

    def check(self, path: str, served: Iterable[str]) -> Checked:
        """Compare a checkpoint with what is known; blocks, called in a thread.

        Args:
            path: what the engines will be told.
            served: what they say they serve: folders, or other names.
        """
        tensors = tensors_of(path)
        known = self._known(served) if tensors else None
        if not tensors or known is None or not known.tensors:
            return Checked(path, tensors, [])
        ignored = {name for name in (*tensors, *known.tensors) if name.endswith(_COMPUTED)}
        if _ties(path) or _ties(known.path):
            ignored.add(_TIED)
        lines, other_dtypes = differences(tensors, known.tensors, ignored=ignored)
        if other_dtypes:
            _log.info("weights.other_dtypes", path=path, known=known.path, names=listed(other_dtypes))
        if lines:
            words = f"its tensors are not those of {known.path!r}; pass `check_names: false` if that is meant"
            lines.insert(0, words)
        return Checked(path, tensors, lines)

    def keep(self, checked: Checked | None) -> None:
        """All of an update came from there: what comes next has to have the same."""
        if checked is not None and checked.tensors:
            self._last = Checked(checked.path, checked.tensors, [])

    def _known(self, served: Iterable[str]) -> Checked | None:
        if self._last is not None:
            return self._last
        for path in dict.fromkeys(served):
            if tensors := tensors_of(path):
                return Checked(path, tensors, [])
        return None


def _ties(path: str) -> bool:
    """Whether a checkpoint's model takes its output weights from the embedding."""
    place = Path(path)
    try:
        said = json.loads((place / _CONFIG if place.is_dir() else place.with_name(_CONFIG)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("tie_word_embeddings") is True
