"""One Ray cluster of four nodes for all tests of this folder, and its dashboard, which answers Ray's state API."""

from collections.abc import Iterator

import pytest

from tests.cluster.nodes import Nodes, started


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Start the cluster, with a home of its own, and be its driver."""
    with started() as nodes:
        yield nodes
