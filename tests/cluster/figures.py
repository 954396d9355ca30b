"""What the tests of this folder measured: shown by `-s`, and kept in the file that `CLUSTER_FIGURES` names.

- A file has one value by name; a run rewrites what it measured, and leaves the rest.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["show"]


def show(name: str, value: Any) -> None:
    """Say what was measured, and keep it."""
    print(f"{name}: {value}")  # noqa: T201 - shown by `-s`
    named = os.environ.get("CLUSTER_FIGURES")
    if named is None:
        return
    path = Path(named)
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | {name: value}, indent=2, sort_keys=True) + "\n")
