"""One engine for all of these tests, and the forward that knows its answers.

They need the environment of `make test-vllm`; without it they fail, for a skipped test proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.vllm.models import Oracle
from tests.vllm.server import ENGINE_PYTHON, Server

LAST: Final = "test_killed_during_a_pause"
"""Leaves no engine behind, and a start is what costs most here."""
TEST_S: Final = 420.0
"""One test, in seconds: a start of the engine alone may take minutes where others use the cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each of these tests its time, and its turn."""
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in here:
        item.add_marker(pytest.mark.timeout(TEST_S))
    items.sort(key=lambda item: item in here and item.name == LAST)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """The two models, and what they say."""
    assert ENGINE_PYTHON.exists(), f"no {ENGINE_PYTHON}: run `make test-vllm`"
    made = Oracle(tmp_path_factory.mktemp("models"))
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def server(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A vLLM that serves model `a`; started once, and again by whoever ended it."""
    made = Server(oracle.path("a"), tmp_path_factory.mktemp("vllm") / "server.log")
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def engine(server: Server) -> Server:
    """That vLLM, as it was when it started."""
    if not server.is_up():
        server.stop()
        server.start()
    server.reset()
    return server
