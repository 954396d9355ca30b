"""One Ray cluster of four nodes for all tests of this folder, and its dashboard, which answers Ray's state API."""

from collections.abc import Iterator

import pytest

from tests.cluster.leftovers import left_behind, nothing_left
from tests.cluster.nodes import Nodes, started


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Start the cluster, with a home of its own, and be its driver."""
    with started() as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """See that no actor, placement group or engine lives after a test that did not live before it."""
    if "nodes" not in request.fixturenames:
        yield
        return
    request.getfixturevalue("nodes")
    before = left_behind()
    yield
    nothing_left(before)
