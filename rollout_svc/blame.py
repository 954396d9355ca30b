"""Where somebody else's code raised: the file and line a user can open. Pure, and never raises."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Final

__all__ = ["place_of"]

_OURS: Final = str(Path(__file__).parent)
_LIBRARIES: Final = (f"{sys.base_prefix}/lib", f"{sys.prefix}/lib", "<frozen")


def place_of(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of the plugin's own code, else of any but ours; empty if none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [frame for frame in frames if not frame[0].startswith(_OURS)]
    own = [frame for frame in theirs if not frame[0].startswith(_LIBRARIES)]
    for file, line in reversed(own or theirs):
        return f"{file}:{line}"
    return ""
