"""What every test needs."""

import asyncio
from pathlib import Path

import pytest

# pytest-asyncio asks for the main thread's loop around each synchronous fixture; where none was ever set, Python 3.11
# makes one that nobody closes, and the run ends with a ResourceWarning. Once set, to None, it is not made.
asyncio.set_event_loop(None)

_RAY = Path(__file__).parent / "ray"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests in one process, for what it starts is shared, and all tests of Ray: one cluster."""
    for item in items:
        together = "ray" if _RAY in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(together))
