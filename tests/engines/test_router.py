"""What a router in front changes about the dialect: fewer words, and who is gone when one is."""

from __future__ import annotations

import orjson
import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import GenerateRequest, Reply, SGLangDialect
from rollout_svc.engines.router import LISTING, PASSED, PASSED_SAMPLING, RoutedSGLang, listed_engines, too_many
from rollout_svc.errors import SampleFailure, WorkerFailure

DIALECT = RoutedSGLang()
RID = "0" * 32
ENGINES = ["http://a:1", "http://b:1"]


def listing(*urls: object) -> Reply:
    """What a router answers for its list."""
    return Reply(200, orjson.dumps({"workers": [{"url": url} for url in urls]}))


def test_all_that_we_send_of_our_own_passes() -> None:
    """A request of ours is the same as to an engine, and none of its fields is one the router drops."""
    sampling = SamplingConfig(top_k=3, stop=("x",), extra={"min_p": 0.1})
    request = GenerateRequest(RID, [1], 5, sampling, seed=3, extra={"image_data": ["u"]})
    for stream in (False, True):
        call = DIALECT.generate(request, stream=stream)
        assert call == SGLangDialect().generate(request, stream=stream)
        body = orjson.loads(call.body or b"")
        assert body.keys() <= PASSED
        assert body["sampling_params"].keys() <= PASSED_SAMPLING


def test_what_would_not_arrive_is_named() -> None:
    """Both kinds of extra keys, and only those that are dropped."""
    assert DIALECT.refuses(SamplingConfig(extra={"min_p": 0.1})) is None
    said = DIALECT.refuses(SamplingConfig(extra={"min_p": 0.1, "logit_bias": {}, "custom_params": {}}))
    assert said == "extra: the router drops custom_params, logit_bias"
    with pytest.raises(SampleFailure, match="the router drops return_routed_experts"):
        DIALECT.generate(
            GenerateRequest(RID, [1], 5, SamplingConfig(), extra={"return_routed_experts": True, "image_data": []})
        )


def test_a_dropped_sampling_setting_is_never_sent() -> None:
    """Also where nobody asked before, as for a router that was added while the service runs."""
    with pytest.raises(SampleFailure, match="the router drops logit_bias"):
        DIALECT.generate(GenerateRequest(RID, [1], 5, SamplingConfig(extra={"logit_bias": {}})))


def test_an_engine_that_is_gone_is_a_lost_connection() -> None:
    """The router's words for it mean what a broken connection of ours means; its other failures do not."""
    gone = orjson.dumps({"error": {"code": "call_upstream_request_error", "message": "error sending request"}})
    with pytest.raises(WorkerFailure) as raised:
        DIALECT.parse_generate(Reply(500, gone))
    assert (raised.value.kind, raised.value.hard, raised.value.accepted) == ("connection", True, True)
    for status, body, kind in ((500, b"{}", "http_500"), (503, gone, "http_503")):
        with pytest.raises(WorkerFailure) as raised:
            DIALECT.parse_generate(Reply(status, body))
        assert (raised.value.kind, raised.value.hard) == (kind, False)


def test_the_listing_is_read() -> None:
    """Addresses, without a slash at the end; ranks of one engine are one engine."""
    assert (LISTING.method, LISTING.path, LISTING.admin) == ("GET", "/workers", False)
    assert listed_engines(listing("http://a:1/", "http://b:1")) == tuple(ENGINES)
    assert listed_engines(listing("http://a:1@0", "http://a:1@1")) == ("http://a:1",)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(404, b""),
        Reply(401, b"{}"),
        Reply(200, b"OK"),
        Reply(200, b"{}"),
        listing(3),
        Reply(200, b'{"workers":1}'),
    ],
)
def test_what_stands_in_front_need_not_say(reply: Reply) -> None:
    """Another balancer has no such list: then nobody knows."""
    assert listed_engines(reply) is None


def test_engines_beside_ours_are_found_out() -> None:
    """By number: addresses may differ where the router sees another network."""
    assert too_many(None, ENGINES) is None
    assert too_many(["http://a:1"], ENGINES) is None
    assert too_many(["http://x:1", "http://y:1"], ENGINES) is None
    said = too_many([*ENGINES, "http://c:1"], ENGINES)
    assert said == "it sends to 3 engines, and 2 are listed: not http://c:1"
