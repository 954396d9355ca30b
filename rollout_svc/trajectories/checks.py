"""What would keep a file of trajectories from being written: looked at before anything starts, and nothing changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rollout_svc.config import TrajectoriesConfig
from rollout_svc.errors import Problem

__all__ = ["trajectory_problems"]

_AT = "trajectories.path"


def trajectory_problems(config: TrajectoriesConfig, others: Mapping[str, str | None]) -> list[Problem]:
    """Return what is wrong with `trajectories.path`; makes no file.

    Args:
        config: the settings.
        others: the files that are not to be written to, by the setting that names them.
    """
    if config.path is None:
        return []
    path = Path(config.path)
    message = _of_others(path, others) or _of_folder(path.parent) or _of_file(path)
    return [] if message is None else [Problem(_AT, message)]


def _of_others(path: Path, others: Mapping[str, str | None]) -> str | None:
    """Prompts are lines of JSON objects too, and a journal may not be there yet: neither shows in the file."""
    own = path.resolve()
    taken = next((key for key, other in others.items() if other is not None and Path(other).resolve() == own), None)
    return None if taken is None else f"{path} is the file of {taken}"


def _of_folder(folder: Path) -> str | None:
    """The folder must take files: that is how the one being written is set aside."""
    if not folder.is_dir():
        return f"no such folder: {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write in {folder}"


def _of_file(path: Path) -> str | None:
    if not path.exists():
        return None
    if not path.is_file():
        return f"not a file: {path}"
    try:
        with path.open("r+b") as file:
            first = file.read(1)
    except OSError as error:
        return f"cannot write {path}: {error.strerror or error}"
    return None if first in {b"", b"{"} else f"{path} holds something else than lines of JSON objects"
