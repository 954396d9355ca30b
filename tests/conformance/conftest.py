"""The sites the promises are run against; a further engine joins by a fixture `site` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from rollout_svc.engines import LMDeployDialect, SGLangDialect, VLLMDialect
from tests.conformance.fakes import FakeSite
from tests.conformance.processes import ALL_CAPABILITIES, BuiltInSite, Engine
from tests.conformance.scene import skip_unshown
from tests.conformance.site import SLOTS, Site
from tests.support.fake_lmdeploy import FakeLMDeploy
from tests.support.fake_sglang import FakeSGLang
from tests.support.fake_vllm import FakeVLLM

NAMES = ("built-in", "sglang-fake", "vllm-fake", "lmdeploy-fake")
LMDEPLOY_CAPABILITIES = frozenset({"abort", "abort_all", "stream"})


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest) -> None:
    """Skip what the site says cannot be shown there, with its reason."""
    if "site" in request.fixturenames:
        skip_unshown(request, request.getfixturevalue("site"))


@pytest.fixture(scope="session")
def built_in() -> Iterator[Engine]:
    """One process for all tests."""
    engine = Engine()
    yield engine
    engine.kill()


@pytest.fixture(params=NAMES)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """One engine, empty and well."""
    if request.param == "built-in":
        engine: Engine = request.getfixturevalue("built_in")
        engine.start()
        made = BuiltInSite(engine)
        yield made
        made.heal()
    elif request.param == "sglang-fake":
        async with FakeSGLang(slots=SLOTS, weight_version="0") as fake:
            yield FakeSite(fake, SGLangDialect(), ALL_CAPABILITIES)
    elif request.param == "vllm-fake":
        async with FakeVLLM(slots=SLOTS, weight_version="0") as fake:
            yield FakeSite(fake, VLLMDialect(), ALL_CAPABILITIES)
    elif request.param == "lmdeploy-fake":
        async with FakeLMDeploy(slots=SLOTS) as fake:
            yield FakeSite(fake, LMDeployDialect(), LMDEPLOY_CAPABILITIES)
