"""The promises of stopping that hold for every engine (`tests/conformance`), run as they stand against a real vLLM."""

from __future__ import annotations

import pytest

from tests.conformance import test_stopping
from tests.conformance.scene import skip_unshown
from tests.conformance.site import Site
from tests.vllm.conformance import VLLMSite
from tests.vllm.server import Server

globals().update({name: test for name, test in vars(test_stopping).items() if name.startswith("test_")})


@pytest.fixture
def site(engine: Server) -> Site:
    """The engine, empty and well."""
    return VLLMSite(engine)


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest, site: Site) -> None:
    """Skip what the site says cannot be shown there, with its reason."""
    skip_unshown(request, site)
