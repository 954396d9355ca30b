"""The promises of stopping that hold for every engine (`tests/conformance`), run as they stand against a real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, Final

import pytest

from tests.conformance import test_stopping
from tests.conformance.scene import skip_unshown
from tests.conformance.site import Site
from tests.vllm.conformance import Missed, VLLMSite
from tests.vllm.server import Server

TRIES: Final = 5

Test = Callable[..., Awaitable[None]]


def tried(test: Test) -> Test:
    """The same test, tried again where the engine was done before it was seen at work."""

    @wraps(test)
    async def again(site: VLLMSite, **others: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                await test(site, **others)
            except Missed:
                await asyncio.to_thread(site.renew)
            else:
                return
        await test(site, **others)

    return again


globals().update({name: tried(test) for name, test in vars(test_stopping).items() if name.startswith("test_")})


@pytest.fixture
def site(engine: Server) -> VLLMSite:
    """The engine, empty and well."""
    return VLLMSite(engine)


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest, site: Site) -> None:
    """Skip what the site says cannot be shown there, with its reason."""
    skip_unshown(request, site)
