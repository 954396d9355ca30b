"""What came of an update at each worker, and the reasons in one line: pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = ["Results", "why"]

Results = dict[str, dict[str, Any]]
"""By worker id: `ok`, `version`, and why not."""
_REASONS: Final = 3  # that the message of a failure tells
_CHARS: Final = 300  # of each


def why(names: Iterable[str], results: Results) -> str:
    """What was wrong at those, each reason once; the whole of it is in the results."""
    said = {name: str(results[name].get("error") or results[name].get("skipped") or "") for name in names}
    told = []
    for words in list(dict.fromkeys(said.values()))[:_REASONS]:
        shown = words if len(words) <= _CHARS else f"{words[: _CHARS - 1]}…"
        told.append(f"{', '.join(name for name, other in said.items() if other == words)}: {shown}")
    return "; ".join(told)
