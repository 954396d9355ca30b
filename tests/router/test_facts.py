"""What the real sglang-router does with requests: the facts that `docs/engines.md` states and the service relies on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_svc.engines.router import PASSED, PASSED_SAMPLING
from tests.router.processes import Router, router_process
from tests.router.recorder import Recorder
from tests.support.fake_router import FakeRouter

WAIT_S = 10.0
POLL_S = 0.005
RID = "0123456789abcdef0123456789abcdef"
SAMPLING = {"max_new_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["a"], "sampling_seed": 3}
WHAT_WE_SEND = {"rid": RID, "input_ids": [1, 2, 3], "sampling_params": SAMPLING, "return_logprob": True}
DROPPED = {
    *("return_routed_experts", "routed_experts_start_len", "return_prompt_token_ids", "session_id", "cache_salt"),
    *("routing_key", "routed_dp_rank", "return_sampling_mask", "unheard_of"),
}
DROPPED_SAMPLING = {
    *("custom_params", "stop_regex", "logit_bias", "spaces_between_special_tokens", "stream_interval"),
    *("structural_tag", "watermark", "beam_width"),
}
VALUES: dict[str, Any] = {
    "rid": RID,
    "input_ids": [1, 2, 3],
    "token_ids_logprob": [1],
    "image_data": ["http://x"],
    "video_data": ["http://x"],
    "modalities": ["text"],
    "session_params": {"a": 1},
    "custom_labels": {"a": "b"},
    "stop": ["a"],
    "stop_token_ids": [3],
    "custom_params": {"a": 1},
    "logit_bias": {"1": 2.0},
    "stream": False,
    "json_schema": "{}",
}
NUMBERS = {"top_p", "temperature", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
INTEGERS = {
    *("logprob_start_len", "top_logprobs_num", "priority", "data_parallel_rank", "routed_dp_rank", "top_k", "n"),
    *("bootstrap_port", "bootstrap_room"),
    *("max_new_tokens", "min_new_tokens", "sampling_seed", "stream_interval", "routed_experts_start_len"),
}
FLAGS = {
    *("return_logprob", "return_routed_experts", "return_prompt_token_ids", "ignore_eos", "skip_special_tokens"),
    *("no_stop_trim", "spaces_between_special_tokens", "return_sampling_mask", "background", "log_metrics", "no_logs"),
    *("return_bytes", "return_entropy", "return_hidden_states", "return_text_in_logprobs"),
}
BOTH = pytest.mark.parametrize("real", [True, False], ids=["real", "fake"])
PAST_THE_ROUTER = ("/abort_request", "/pause_generation", "/continue_generation", "/update_weights_from_disk")


class Front:
    """A router with two recording engines behind it."""

    def __init__(self, router: Router | FakeRouter, engines: list[Recorder], session: aiohttp.ClientSession) -> None:
        self.router = router
        self.engines = engines
        self.session = session

    async def generate(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any, Any]:
        """Generate through the router; returns status, body and headers."""
        sent = WHAT_WE_SEND | body
        async with self.session.post(f"{self.router.url}/generate", json=sent, headers=headers) as response:
            assert response.content_type == "application/json", await response.text()
            return response.status, await response.json(), response.headers

    async def by(self, headers: dict[str, str] | None = None) -> str:
        """The url of the engine that answered."""
        status, body, _ = await self.generate(headers)
        assert status == 200
        return str(body["by"])

    async def listed(self) -> list[dict[str, Any]]:
        """Whom it says it sends to."""
        async with self.session.get(f"{self.router.url}/workers") as response:
            listed: list[dict[str, Any]] = (await response.json())["workers"]
            return listed

    @property
    def arrived(self) -> int:
        """Generations that reached an engine."""
        return sum(len(engine.received) for engine in self.engines)

    @property
    def inside(self) -> int:
        """Generations an engine is at."""
        return sum(engine.inside for engine in self.engines)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """The router greets every engine in HTTP/2 as well, which aiohttp's server logs as an error."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


@asynccontextmanager
async def front(log: Path, *flags: str, policy: str = "round_robin", real: bool = True) -> AsyncIterator[Front]:
    """A router with retries off, unless the flags say otherwise; or the fake, which has to do the same."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Recorder()) for _ in range(2)]
        urls = [engine.url for engine in engines]
        flags = flags or ("--disable-retries",)
        router: Router | FakeRouter = (
            await stack.enter_async_context(router_process(urls, log, "--policy", policy, *flags))
            if real
            else await stack.enter_async_context(FakeRouter(urls))
        )
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Front(router, engines, session)


async def until(reached: Callable[[], bool]) -> None:
    """Look again and again until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not reached():  # noqa: ASYNC110 - what happens is in other processes: there is no event to wait for
            await asyncio.sleep(POLL_S)


def value_of(name: str) -> Any:
    """Something of the type that a field has."""
    known = {**dict.fromkeys(NUMBERS, 0.5), **dict.fromkeys(INTEGERS, 1), **dict.fromkeys(FLAGS, True), **VALUES}
    return known.get(name, "v")


def listening() -> str:
    """Addresses that sockets of this machine have, as the kernel writes them."""
    return Path("/proc/net/tcp").read_text()


@BOTH
async def test_what_arrives_of_a_request(tmp_path: Path, real: bool) -> None:
    """A request is written anew: what we send arrives as it is, and what asks for routed experts does not."""
    sampling = {name: value_of(name) for name in PASSED_SAMPLING | DROPPED_SAMPLING}
    named = PASSED - {"sampling_params", "text", "input_embeds"}  # the prompt is given once
    body = {name: value_of(name) for name in named | DROPPED} | {"sampling_params": sampling}
    async with front(tmp_path / "router.log", real=real) as at:
        assert (await at.generate(**body))[0] == 200
        arrived = next(engine.received[0].body for engine in at.engines if engine.received)
        assert {name: arrived[name] for name in named} == {name: body[name] for name in named}
        assert not DROPPED & set(arrived)
        assert set(arrived["sampling_params"]) == PASSED_SAMPLING
        assert arrived["sampling_params"] == {name: sampling[name] for name in PASSED_SAMPLING}


@BOTH
async def test_keys_and_statuses_pass_through(tmp_path: Path, real: bool) -> None:
    """An engine's refusal arrives as it was, with its `Retry-After`; the key is passed on; nothing is repeated."""
    async with front(tmp_path / "router.log", real=real) as at:
        for status in (400, 401, 404, 429, 500, 503):
            before = at.arrived
            for engine in at.engines:
                engine.status = status
            found, body, headers = await at.generate({"Authorization": "Bearer secret"})
            assert (found, body["rid"], headers["Retry-After"]) == (status, RID, "7")
            assert at.arrived == before + 1
        assert {r.headers["Authorization"] for engine in at.engines for r in engine.received} == {"Bearer secret"}


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_with_its_retries_on_it_repeats_under_the_same_id(tmp_path: Path, status: int) -> None:
    """Why they have to be off: one request of ours would run up to five times, on either engine, under one id."""
    async with front(tmp_path / "router.log", "--retry-max-retries", "5") as at:
        for engine in at.engines:
            engine.status = status
        assert (await at.generate())[0] == status
        assert at.arrived == 5
        assert {received.body["rid"] for engine in at.engines for received in engine.received} == {RID}


@BOTH
async def test_a_client_that_leaves_is_felt_at_the_engine(tmp_path: Path, real: bool) -> None:
    """Closing a call's connection ends it at its engine as well."""
    async with front(tmp_path / "router.log", real=real) as at:
        for engine in at.engines:
            engine.hold.clear()
        calls = [asyncio.create_task(at.generate(rid=f"{n:032x}"), name=f"call:{n}") for n in range(8)]
        await until(lambda: at.inside == 8)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: at.inside == 0)
        assert [engine.left for engine in at.engines] == [4, 4]


async def test_no_request_can_be_sent_to_an_engine_of_our_choice(tmp_path: Path) -> None:
    """No header names the engine; under the policy `manual` a key sticks to one, of the router's choice."""
    async with front(tmp_path / "router.log") as at:
        first = {"X-SMG-Target-Worker": at.engines[0].url}
        assert {await at.by(first) for _ in range(4)} == {engine.url for engine in at.engines}
    async with front(tmp_path / "router.log", policy="manual") as at:
        for key in ("a", "b", "c"):
            assert len({await at.by({"X-SMG-Routing-Key": key}) for _ in range(4)}) == 1


@BOTH
async def test_an_engine_that_is_gone(tmp_path: Path, real: bool) -> None:
    """It is named in a 500 at once; after ten failures it is left out, and still listed as healthy."""
    async with front(tmp_path / "router.log", real=real) as at:
        gone = at.engines[0]
        await gone.stop()
        answers = [await at.generate() for _ in range(40)]
        failed = [body["error"] for status, body, _ in answers if status == 500]
        assert len(failed) == 10
        assert {error["code"] for error in failed} == {"call_upstream_request_error"}
        assert all(gone.url in error["message"] for error in failed)
        assert all(status == 200 for status, _, _ in answers[20:])
        assert all(engine["is_healthy"] for engine in await at.listed())


@BOTH
async def test_with_every_engine_gone_it_says_503(tmp_path: Path, real: bool) -> None:
    """The router is there, and has nobody to send to."""
    async with front(tmp_path / "router.log", real=real) as at:
        for engine in at.engines:
            await engine.stop()
        answers = [await at.generate() for _ in range(24)]
        assert [status for status, _, _ in answers] == [500] * 20 + [503] * 4
        assert answers[-1][1]["error"]["code"] == "no_available_workers"
        for path in ("/liveness", "/readiness", "/health") if real else ("/liveness",):
            async with at.session.get(f"{at.router.url}{path}") as response:
                assert (path, response.status) == (path, 200)


@BOTH
async def test_control_does_not_pass(tmp_path: Path, real: bool) -> None:
    """Aborts, pauses and weights are 404 there; it lists whom it sends to."""
    async with front(tmp_path / "router.log", real=real) as at:
        for path in PAST_THE_ROUTER:
            async with at.session.post(f"{at.router.url}{path}", json={}) as response:
                assert (path, response.status) == (path, 404)
        for path in ("/ping", "/v1/loads", "/server_info"):
            async with at.session.get(f"{at.router.url}{path}") as response:
                assert (path, response.status) == (path, 404)
        listed = await at.listed()
        assert {engine["url"] for engine in listed} == {engine.url for engine in at.engines}


async def test_one_id_is_one_text(tmp_path: Path) -> None:
    """A list of ids, as SGLang takes for a batch, is not understood."""
    async with front(tmp_path / "router.log") as at:
        batch = WHAT_WE_SEND | {"input_ids": [[1], [2]], "rid": ["a", "b"]}
        async with at.session.post(f"{at.router.url}/generate", json=batch) as response:
            assert response.status == 422


async def test_what_it_asks_of_engines_and_where_it_listens(tmp_path: Path) -> None:
    """It looks at an engine before it sends there; its metrics are on loopback alone, where they are told to be."""
    async with front(tmp_path / "router.log") as at:
        asked = {path for engine in at.engines for path in engine.others}
        assert asked == {"GET /health", "GET /model_info", "GET /server_info"}
        assert isinstance(at.router, Router)
        assert f"0100007F:{at.router.metrics_port:04X}" in listening()
