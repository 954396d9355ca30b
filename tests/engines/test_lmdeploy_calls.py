"""What the LMDeploy dialect sends, and how it reads the answers on the control lane."""

import json
from typing import Any

import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import EngineProfile, GenerateRequest, Health, LMDeployDialect, Reply
from rollout_svc.errors import WorkerFailure

DIALECT = LMDeployDialect()
WIRE = "0123456789abcdef0123456789abcdef"
SESSION = 10**9 + int(WIRE, 16) % 2**52
OFF = "This server does not support abort requests. Enable with --enable-abort-handling flag."
NO_LOGPROBS = "return_logprob(True) requested but not enabled logprobs_mode in engine configuration."
NO_EXPERTS = "routed experts requested but not configured in engine configuration. May start api_server with …"
NO_PROMPT = "The input_ids must not be an empty list"


def body(content: Any, status: int = 200) -> Reply:
    """Make an answer with this JSON."""
    return Reply(status, json.dumps(content).encode())


def said(status: int, message: str) -> Reply:
    """Make an error in the server's envelope."""
    return body({"message": message, "type": "x", "code": status, "param": None, "object": "error"}, status)


def sent(sampling: SamplingConfig, max_tokens: int = 5, **rest: Any) -> dict[str, Any]:
    """Build a generation call and return its body."""
    stream = rest.pop("stream", False)
    request = GenerateRequest(WIRE, [1, 2], max_tokens, sampling, rest.pop("seed", None), rest)
    call = DIALECT.generate(request, stream=stream)
    assert (call.method, call.path, call.admin) == ("POST", "/generate", False)
    content: dict[str, Any] = json.loads(call.body or b"")
    return content


# -- generation ----------------------------------------------------------------------------------------------


def test_what_a_generation_asks_for() -> None:
    """Token ids in, with logprobs and the stop token out, under our id, and no default of the engine's or the model's.

    Left out, `top_k` would be 50, and the others what the model's `generation_config.json` says.
    """
    assert sent(SamplingConfig()) == {
        "session_id": SESSION,
        "input_ids": [1, 2],
        "max_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_logprob": True,
        "include_stop_str_in_output": True,
        "stream": False,
    }
    assert sent(SamplingConfig(), stream=True)["stream"] is True


def test_settings_are_sent_in_the_engines_words() -> None:
    """Each setting that is set has the engine's name for it; further ones go as they are, empty ones do not."""
    sampling = SamplingConfig(
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop=("a", "b"),
        extra={"min_p": 0.1, "ignore_eos": False, "stop_token_ids": [], "repetition_penalty": None},
    )
    content = sent(sampling)
    assert (content["temperature"], content["top_p"], content["top_k"], content["stop"]) == (0.5, 0.9, 3, ["a", "b"])
    assert (content["min_p"], content["ignore_eos"], content["repetition_penalty"]) == (0.1, False, 1.0)
    assert "stop_token_ids" not in content


def test_nothing_can_take_the_place_of_what_is_ours() -> None:
    """Neither a prompt's own keys nor further settings stand over the budget, the id or the switches."""  # P6
    extra = {"max_tokens": 4096, "return_logprob": False, "include_stop_str_in_output": False, "session_id": 3}
    content = sent(SamplingConfig(extra=extra), image_data=["x"], session_id=7, input_ids=[9], temperature=9)
    assert (content["max_tokens"], content["session_id"], content["input_ids"]) == (5, SESSION, [1, 2])
    assert (content["return_logprob"], content["include_stop_str_in_output"]) == (True, True)
    assert (content["image_data"], content["temperature"]) == (["x"], 1.0)


def test_no_seed_is_sent() -> None:
    """It takes none, and would ignore one in silence."""
    assert not any("seed" in key for key in sent(SamplingConfig(), seed=3))


@pytest.mark.parametrize("wire", ["0" * 32, "f" * 32, WIRE])
def test_session_ids(wire: str) -> None:
    """Ids are out of the way of the engine's own, the same in an abort, and exact in a JSON number."""  # P20
    call = DIALECT.generate(GenerateRequest(wire, [1], 1, SamplingConfig()))
    session = json.loads(call.body or b"")["session_id"]
    assert 10**9 <= session < 2**53
    assert json.loads(DIALECT.abort([wire])[0].body or b"")["session_id"] == session


def test_many_settings_do_not_mix() -> None:
    """Encoded settings are kept for speed, and each request still gets its own."""
    settings = [SamplingConfig(temperature=number / 1000) for number in range(600)]
    for sampling in settings + settings[:10]:
        assert sent(sampling)["temperature"] == sampling.temperature
    assert len(DIALECT._params) <= 256


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingConfig(), None),
        (SamplingConfig(temperature=2, top_p=0.01, top_k=1, extra={"min_p": 0.1, "seed": None, "n": ""}), None),
        (SamplingConfig(seed=0), "seed: "),
        (SamplingConfig(temperature=2.5), "temperature: LMDeploy takes 0 to 2, not 2.5"),
        (SamplingConfig.model_construct(top_p=0.0, temperature=1.0, seed=None, top_k=None, extra={}), "top_p: "),
        (SamplingConfig(extra={"logit_bias": {"1": 2}, "n": 2}), "extra.logit_bias: "),
        (SamplingConfig(extra={"min_new_tokens": 0}), "extra.min_new_tokens: "),
    ],
)
def test_settings_it_cannot_do(sampling: SamplingConfig, field: str | None) -> None:
    """What the engine would refuse, or ignore in silence, is refused by name before anything starts."""  # P35
    problem = DIALECT.refuses(sampling)
    assert problem is None if field is None else (problem or "").startswith(field)


# -- what it is ----------------------------------------------------------------------------------------------

MODELS = body({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "lmdeploy", "root": "m"}]})
GONE = said(400, "Session -1 not found.")
PYTORCH = body('{"tp_size":1}')
NO_GROUP = body({"success": False, "message": "group 'rollout-svc-nobody' not initialized"}, 400)


def probed(
    models: Reply | WorkerFailure = MODELS,
    abort: Reply | WorkerFailure = GONE,
    nothing: Reply | WorkerFailure | None = None,
    backend: Reply | WorkerFailure = PYTORCH,
    group: Reply | WorkerFailure = NO_GROUP,
) -> EngineProfile:
    """Read the answers to a probe."""
    return DIALECT.parse_probe([models, abort, nothing or said(400, NO_PROMPT), backend, group])


def test_the_probe_changes_nothing() -> None:
    """It looks, aborts a session and leaves a group that nobody has, and asks for what has to be refused."""
    calls = DIALECT.probe()
    assert [(call.method, call.path) for call in calls] == [
        ("GET", "/v1/models"),
        ("POST", "/abort_request"),
        ("POST", "/generate"),
        ("GET", "/distserve/engine_info"),
        ("POST", "/destroy_weights_update_group"),
        ("GET", "/is_sleeping"),
    ]
    assert json.loads(calls[1].body or b"") == {"session_id": -1, "abort_all": False}
    assert json.loads(calls[2].body or b"")["input_ids"] == []


def test_profile() -> None:
    """What it can do; what it serves; what its logprobs are of; never what it cannot or does not say."""
    profile = probed()
    ways = ("cuda_ipc", "distributed")
    assert profile.capabilities == ("abort", "abort_all", "stream", "experts", *ways)
    assert (profile.dialect, profile.model, profile.logprobs) == ("lmdeploy", "m", "raw")
    assert (profile.context, profile.max_running, profile.weight_label) == (None, None, None)
    [warning] = profile.warnings
    assert "prefix cache" in warning  # P25


def test_without_routed_experts() -> None:
    """The switch is not on, or it does not say: not claimed."""
    assert "experts" not in probed(nothing=said(400, NO_EXPERTS)).capabilities
    assert "experts" not in probed(nothing=said(400, "something else")).capabilities


@pytest.mark.parametrize(
    "group", [body({"detail": "Not Found"}, 404), body({"detail": "Not Implemented"}, 501), WorkerFailure("late", "")]
)
def test_without_groups(group: Reply | WorkerFailure) -> None:
    """Too old, another backend, or no answer: not claimed."""
    assert "distributed" not in probed(group=group).capabilities


def test_turbomind() -> None:
    """The other backend fails where it is asked: what its logprobs are of is not known, and that is said."""
    profile = probed(backend=Reply(500, b"Internal Server Error"))
    assert profile.logprobs == "unknown"
    assert any("PyTorch" in warning for warning in profile.warnings)
    assert (profile.ranks, "cuda_ipc" in profile.capabilities) == (1, False)


@pytest.mark.parametrize(
    ("info", "ranks"),
    [('{"tp_size":4,"dp_size":1}', 4), ({"tp_size": 2}, 2), ("{}", 1), ('{"tp_size":0}', 1), ("x", 1), ([], 1)],
)
def test_ranks(info: object, ranks: int) -> None:
    """Its engine info is JSON in a JSON string; one rank where it does not say."""
    assert probed(backend=body(info)).ranks == ranks


def test_asleep() -> None:
    """Asleep it cannot show its switches: it is taken, and that is said."""
    profile = probed(nothing=said(503, "Engine is sleeping; call POST /wakeup before inference"))
    assert any("asleep" in warning for warning in profile.warnings)


@pytest.mark.parametrize(
    ("replies", "kind", "words"),
    [
        ({"abort": Reply(501, OFF.encode())}, "unfit", "--enable-abort-handling"),
        ({"nothing": said(400, NO_LOGPROBS)}, "unfit", "--logprobs-mode"),
        ({"models": body({"detail": "Not Found"}, 404)}, "wrong_dialect", "Not Found"),
        ({"models": body({"data": [{"id": "m", "owned_by": "vllm"}]})}, "wrong_dialect", "'vllm'"),
        ({"models": body({"data": []})}, "wrong_dialect", "/v1/models"),
        ({"models": body([])}, "wrong_dialect", "/v1/models"),
        ({"models": Reply(200, b"<html>")}, "wrong_dialect", "<html>"),
        ({"nothing": body({"detail": "Not Found"}, 404)}, "wrong_dialect", "/generate"),
        ({"abort": body({"detail": "Not Found"}, 404)}, "wrong_dialect", "/abort_request"),
        ({"models": said(401, "Unauthorized.")}, "unauthorized", "Unauthorized."),
        ({"models": WorkerFailure("connection", "refused")}, "connection", "refused"),
        ({"nothing": WorkerFailure("control_timeout", "late")}, "control_timeout", "late"),
    ],
)
def test_what_is_not_taken(replies: dict[str, Any], kind: str, words: str) -> None:
    """Another engine, a proxy, a missing switch, a wrong key, no answer: one line with what was said."""
    with pytest.raises(WorkerFailure) as caught:
        probed(**replies)
    assert caught.value.kind == kind
    assert words in str(caught.value)


# -- looks ---------------------------------------------------------------------------------------------------


def test_info_tells_the_process() -> None:
    """No label; which process it is, as far as its metrics are on."""  # P19
    page = b"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.79522033025e+09\nother 1.0\n"
    info = DIALECT.parse_info(Reply(200, page))
    assert (info.weight_label, info.weight_version, info.process) == (None, None, "1.79522033025e+09")
    assert DIALECT.parse_info(Reply(200, b"other 1.0\n")).process is None
    assert DIALECT.parse_info(body({"detail": "Not Found"}, 404)).process is None
    with pytest.raises(WorkerFailure, match="Unauthorized"):
        DIALECT.parse_info(said(401, "Unauthorized."))


@pytest.mark.parametrize(
    ("status", "code", "alive", "ready"),
    [
        ("healthy", 200, True, True),
        ("sleeping", 200, True, False),
        ("initializing", 503, True, False),
        ("unhealthy", 503, False, False),
        ("new word", 200, True, False),
    ],
)
def test_health(status: str, code: int, alive: bool, ready: bool) -> None:
    """Asleep or loading it is there and takes nothing; `unhealthy` is an engine that died under its server."""
    reply = body({"status": status, "message": "words"}, code)
    assert DIALECT.parse_ping(reply) == Health(alive, ready, f"GET /health: {status}: words")
    assert (DIALECT.ping().method, DIALECT.ping().path) == ("GET", "/health")


@pytest.mark.parametrize("raw", [b"", b"ok", b"[]", b"{}", b"null", b'{"status": null}'])
def test_an_odd_health(raw: bytes) -> None:
    """Somebody answers, and does not say that it is well."""
    health = DIALECT.parse_ping(Reply(200, raw))
    assert (health.alive, health.ready) == (True, False)


# -- control -------------------------------------------------------------------------------------------------


def test_aborts() -> None:
    """Everything in one call, or one call an id; with the admin key, never with a default."""
    [everything] = DIALECT.abort(None)
    assert (everything.path, everything.admin, everything.body) == ("/abort_request", True, b'{"abort_all":true}')
    by_id = [json.loads(call.body or b"") for call in DIALECT.abort([WIRE, "0" * 32])]
    assert by_id == [{"session_id": SESSION, "abort_all": False}, {"session_id": 10**9, "abort_all": False}]
    assert DIALECT.abort([]) == []


@pytest.mark.parametrize("reply", [Reply(200, b""), Reply(200, b"null"), said(400, "Session 1000000007 not found.")])
def test_done(reply: Reply) -> None:
    """A session that is not there any more is what an abort was for."""
    DIALECT.parse_done(reply)


@pytest.mark.parametrize(
    "reply",
    [Reply(501, OFF.encode()), said(400, "session_id: Input should be a valid integer"), said(404, "Not Found")],
)
def test_not_done(reply: Reply) -> None:
    """Any other refusal carries the engine's own words."""
    with pytest.raises(WorkerFailure) as caught:
        DIALECT.parse_done(reply)
    assert reply.body.decode()[:20] in str(caught.value)


def test_what_it_cannot_do() -> None:
    """A path, a freeze and a count are refused where they are asked for; no label and no cache need no call."""  # P24
    for asked in (
        lambda: DIALECT.update_from_disk("/w", 3),
        lambda: DIALECT.freeze("keep"),
        lambda: DIALECT.parse_loads(Reply(200, b"lmdeploy:num_requests_running 0.0")),
    ):
        with pytest.raises(WorkerFailure, match="LMDeploy"):
            asked()
    assert DIALECT.set_version(3) == DIALECT.thaw() == DIALECT.flush_cache() == []
