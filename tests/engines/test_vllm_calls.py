"""The calls the vLLM dialect makes, and how it reads what control answers."""

from typing import Any

import orjson
import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Call, GenerateRequest, Reply, VLLMDialect
from rollout_svc.errors import WorkerFailure
from tests.engines.vllm_bodies import REQUEST_ID, as_reply

DIALECT = VLLMDialect()


def body_of(call: Call) -> Any:
    """Decode what a call carries."""
    assert call.body is not None
    return orjson.loads(call.body)


def request(sampling: SamplingConfig | None = None, **fields: Any) -> GenerateRequest:
    """Make a generation of a prompt of three tokens."""
    return GenerateRequest(REQUEST_ID, [1, 2, 3], 16, sampling or SamplingConfig(), **fields)


# -- generation ----------------------------------------------------------------------------------------------


def test_a_generation() -> None:
    """Ids in, ids out; the id, the budget and the logprobs are always said; the data key guards it."""
    call = DIALECT.generate(request())
    assert (call.method, call.path, call.admin) == ("POST", "/inference/v1/generate", False)
    assert body_of(call) == {
        "request_id": REQUEST_ID,
        "token_ids": [1, 2, 3],
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 16, "logprobs": 0},
        "output_mode": "tokens",
        "stream": False,
    }


def test_everything_in_sampling_is_passed() -> None:
    """`extra` is merged into `sampling_params`; null and empty values are not sent, and zero and false are."""
    extra = {"min_p": 0.1, "stop_token_ids": [2], "ignore_eos": False, "top_k": 0, "bad_words": [], "seed": None}
    sampling = SamplingConfig(temperature=0, top_p=0.9, stop=("END",), extra=extra)
    params = body_of(DIALECT.generate(request(sampling, seed=5)))["sampling_params"]
    assert params == {
        "temperature": 0,
        "top_p": 0.9,
        "stop": ["END"],
        "min_p": 0.1,
        "stop_token_ids": [2],
        "ignore_eos": False,
        "top_k": 0,
        "max_tokens": 16,
        "logprobs": 0,
        "seed": 5,
    }


def test_a_prompts_own_keys_go_to_the_top() -> None:
    """`engine_extra` stands beside the prompt, and cannot replace what the service relies on."""
    extra = {"cache_salt": "a", "request_id": "mine", "output_mode": "text", "stream": True, "token_ids": [9]}
    body = body_of(DIALECT.generate(request(extra=extra)))
    assert body["cache_salt"] == "a"
    assert (body["request_id"], body["output_mode"], body["stream"]) == (REQUEST_ID, "tokens", False)
    assert body["token_ids"] == [1, 2, 3]


def test_a_stream_is_asked_for() -> None:
    """By `stream` alone."""
    assert body_of(DIALECT.generate(request(), stream=True))["stream"] is True


def test_samplings_are_told_apart() -> None:
    """What is kept of one is not used for another, however many there are."""
    dialect = VLLMDialect()
    samplings = [SamplingConfig(temperature=n / 1000) for n in range(600)]
    for sampling in [*samplings, *samplings]:
        params = body_of(dialect.generate(request(sampling)))["sampling_params"]
        assert params["temperature"] == sampling.temperature


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"max_new_tokens": 5}, "extra.max_new_tokens: vLLM knows no such key"),
        ({"sampling_seed": 5}, "sampling.seed"),
        ({"regex": "a+"}, "structured_outputs"),
        ({"n": 2}, "extra.n: set by the service"),
        ({"max_tokens": 5}, "extra.max_tokens: set by the service"),
        ({"min_p": 0.1, "logprobs": 5}, "extra.logprobs"),
    ],
)
def test_settings_that_would_be_lost_are_named(extra: dict[str, Any], named: str) -> None:
    """The engine ignores keys it does not know: a config that uses another engine's is refused by name."""
    refusal = DIALECT.refuses(SamplingConfig(extra=extra))
    assert refusal is not None
    assert named in refusal


@pytest.mark.parametrize("extra", [{}, {"n": 1}, {"min_tokens": 3}, {"max_new_tokens": None}, {"logit_bias": {"1": 2}}])
def test_settings_of_its_own_are_taken(extra: dict[str, Any]) -> None:
    """Anything else is passed as it is, known here or not."""
    assert DIALECT.refuses(SamplingConfig(extra=extra)) is None


# -- aborts --------------------------------------------------------------------------------------------------


def test_an_abort_names_the_engines_ids() -> None:
    """One call for all, by the route beside generation, with its key; the id is derived, nothing is remembered."""
    [call] = DIALECT.abort(["a" * 32, "b" * 32])
    assert (call.path, call.admin) == ("/inference/v1/abort_requests", False)
    assert body_of(call) == {"request_ids": ["generate-tokens-" + "a" * 32, "generate-tokens-" + "b" * 32]}


def test_no_ids_make_no_call() -> None:
    """An empty list means "everything" there: it is never sent."""
    assert DIALECT.abort([]) == []


def test_an_abort_of_everything() -> None:
    """By the development mode's own route, which needs a body."""
    assert DIALECT.abort(None) == [Call("POST", "/abort_requests", b"{}", admin=True)]


# -- control -------------------------------------------------------------------------------------------------


def test_freezing_says_what_becomes_of_the_cache() -> None:
    """`keep` in both; whether it preempts is always said, for by default it does."""  # P25
    assert DIALECT.freeze("keep") == [Call("POST", "/pause?mode=keep&clear_cache=false", admin=True)]
    assert DIALECT.freeze("drop") == [Call("POST", "/pause?mode=keep&clear_cache=true", admin=True)]
    assert DIALECT.thaw() == [Call("POST", "/resume", admin=True)]


def test_weights_from_disk() -> None:
    """Load, drop what was cached under the old ones, then label: until then the label is none."""  # P24, P25
    before, load, flush, label = DIALECT.update_from_disk("/weights/7", 7)
    assert (before.path, body_of(before)) == ("/update_weight_version", {"new_version": "loading 7"})
    assert DIALECT.parse_info(as_reply({"weight_version": "loading 7"})).weight_version is None
    assert (load.path, body_of(load)) == (
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": "/weights/7"}},
    )
    assert flush.path == "/reset_prefix_cache?reset_running_requests=false"
    assert (label.path, body_of(label)) == ("/update_weight_version", {"new_version": "7"})
    assert DIALECT.update_from_disk("/weights/7", 7, flush=False) == [before, load, label]


def test_a_load_that_failed_is_forgotten() -> None:
    """Labelled before all else: in the empty round, too, there are no weights. Nothing is labelled as whole."""  # P24
    label, *empty_round = DIALECT.forget_load(7)
    assert (label.path, body_of(label)) == ("/update_weight_version", {"new_version": "loading 7"})
    assert empty_round == [
        Call("POST", "/start_weight_update", admin=True),
        Call("POST", "/finish_weight_update", admin=True),
    ]


def test_a_label_is_a_string() -> None:
    """An integer would be 400."""
    assert [body_of(call) for call in DIALECT.set_version(3)] == [{"new_version": "3"}]


@pytest.mark.parametrize("body", [b"", b'{"status":"paused"}', b'{"results":[null]}', b'{"success":true}', b"[]"])
def test_done(body: bytes) -> None:
    """Any 200 that does not say that it failed."""
    DIALECT.parse_done(Reply(200, body))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (as_reply({"success": False}), "refused"),
        (as_reply({"detail": "Not Found"}, 404), "http_404"),
        (as_reply({"error": {"message": "Worker failed with error"}}, 500), "http_500"),
        (Reply(200, b"{x"), "bad_body"),
    ],
)
def test_not_done(reply: Reply, kind: str) -> None:
    """A cache that was not reset says so with a 200; a route that is not there is told apart."""
    with pytest.raises(WorkerFailure) as caught:
        DIALECT.parse_done(reply)
    assert caught.value.kind == kind


def test_the_label_is_read() -> None:
    """As it was sent; without the development mode there is none."""
    assert DIALECT.parse_info(as_reply({"weight_version": "7"})).weight_version == 7
    assert DIALECT.parse_info(as_reply({"weight_version": "default"})).weight_version is None
    assert DIALECT.parse_info(as_reply({"detail": "Not Found"}, 404)).weight_label is None
    with pytest.raises(WorkerFailure, match="http_500"):
        DIALECT.parse_info(as_reply({}, 500))


def test_health() -> None:
    """200 is well, 503 is an engine core that died; anything else is somebody, not ready."""
    assert DIALECT.ping() == Call("GET", "/health")
    assert DIALECT.parse_ping(Reply(200, b""))[:2] == (True, True)
    dead = DIALECT.parse_ping(Reply(503, b""))
    assert (dead.alive, dead.ready) == (False, False)
    assert "engine core" in dead.reason
    scaling = DIALECT.parse_ping(as_reply({"error": "The model is currently scaling"}, 503))
    assert (scaling.alive, scaling.ready) == (True, False)
    assert "scaling" in scaling.reason
    assert DIALECT.parse_ping(Reply(500, b""))[:2] == (True, False)


# -- counting ------------------------------------------------------------------------------------------------

GAUGES = (
    b"# TYPE vllm:num_requests_running gauge\n"
    b'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0\n'
    b'vllm:num_requests_running{engine="1",model_name="tiny"} 1.0\n'
    b'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0\n'
    b'vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0\n'
    b'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 3.0\n'
    b'vllm:num_preemptions_total{engine="0",model_name="tiny"} 7.0\n'
)


def test_gauges_are_summed_over_engines() -> None:
    """Running and waiting of each; those by reason are in them already."""  # P9
    assert DIALECT.loads() == Call("GET", "/metrics")
    assert DIALECT.parse_loads(Reply(200, GAUGES)) == 6


@pytest.mark.parametrize(
    "text",
    [
        b"",
        GAUGES.split(b"vllm:num_requests_waiting{")[0],
        GAUGES.replace(b" 3.0", b" NaN"),
        GAUGES.replace(b" 3.0", b" +Inf"),
        GAUGES.replace(b" 3.0", b" -1.0"),
        GAUGES.replace(b" 3.0", b" 0.5"),
        GAUGES.replace(b" 3.0", b" many"),
    ],
)
def test_idle_is_believed_only_of_gauges_that_are_there(text: bytes) -> None:
    """A gauge that is missing, or is no count, is no zero."""  # P9
    with pytest.raises(WorkerFailure, match="bad_loads"):
        DIALECT.parse_loads(Reply(200, text))
    with pytest.raises(WorkerFailure, match="http_500"):
        DIALECT.parse_loads(Reply(500, GAUGES))
