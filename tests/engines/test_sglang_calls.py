"""What the SGLang dialect sends, and how it reads the answers on the control lane."""

import json
from typing import Any

import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import GenerateRequest, Reply, SGLangDialect
from rollout_svc.errors import WorkerFailure

DIALECT = SGLangDialect()


def body(content: Any) -> Reply:
    """Make a 200 with this JSON."""
    return Reply(200, json.dumps(content).encode())


def sent(sampling: SamplingConfig, max_tokens: int = 5, seed: int | None = None, **extra: Any) -> dict[str, Any]:
    """Build a generation call and return its body."""
    call = DIALECT.generate(GenerateRequest("r" * 32, [1, 2], max_tokens, sampling, seed, extra))
    assert (call.method, call.path, call.admin, call.body is not None) == ("POST", "/generate", False, True)
    content: dict[str, Any] = json.loads(call.body or b"")
    return content


def test_what_a_generation_asks_for() -> None:
    """Token ids in, with logprobs out, under our id, and only the settings that are set."""
    assert sent(SamplingConfig()) == {
        "rid": "r" * 32,
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 5},
        "return_logprob": True,
        "stream": False,
    }


def test_settings_are_sent_in_the_engines_words() -> None:
    """Each setting that is set has the engine's name for it; further ones go as they are, 0 and false included."""
    sampling = SamplingConfig(
        temperature=0.5, top_p=0.9, top_k=3, stop=("a", "b"), seed=9, extra={"min_p": 0, "ignore_eos": False}
    )
    assert sent(sampling, seed=0)["sampling_params"] == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stop": ["a", "b"],
        "sampling_seed": 0,
        "min_p": 0,
        "ignore_eos": False,
        "max_new_tokens": 5,
    }


def test_null_and_empty_values_are_not_sent() -> None:
    """An engine that refuses unknown or null keys never sees one of ours that says nothing."""
    sampling = SamplingConfig(extra={"regex": None, "stop_token_ids": [], "json_schema": "", "logit_bias": {}})
    assert set(sent(sampling)["sampling_params"]) == {"temperature", "top_p", "max_new_tokens"}


def test_the_budget_is_always_sent() -> None:
    """The engine's own default of 128 is never relied on, and no other setting can take the budget's place."""  # P6
    sampling = SamplingConfig(max_tokens=999, extra={"max_new_tokens": 4096})
    assert sent(sampling, max_tokens=1)["sampling_params"]["max_new_tokens"] == 1


def test_a_prompts_own_keys_cannot_replace_ours() -> None:
    """What a prompt line passes through stands beside our keys, never over them."""
    content = sent(SamplingConfig(), image_data=["x"], rid="theirs", stream=True, input_ids=[9], sampling_params={})
    assert content["image_data"] == ["x"]
    assert (content["rid"], content["stream"], content["input_ids"]) == ("r" * 32, False, [1, 2])
    assert content["sampling_params"]["max_new_tokens"] == 5


def test_many_settings_do_not_mix() -> None:
    """Encoded settings are kept for speed, and each request still gets its own."""
    settings = [SamplingConfig(temperature=number / 1000) for number in range(600)]
    for sampling in settings + settings[:10]:
        assert sent(sampling)["sampling_params"]["temperature"] == sampling.temperature
    assert len(DIALECT._params) <= 256


# -- control -------------------------------------------------------------------------------------------------


def test_aborts() -> None:
    """Everything in one call, or one call an id; both with the admin key, never with a default."""
    [everything] = DIALECT.abort(None)
    assert (everything.path, everything.admin, json.loads(everything.body or b"")) == (
        "/abort_request",
        True,
        {"abort_all": True},
    )
    by_id = [json.loads(call.body or b"") for call in DIALECT.abort(["a", "b"])]
    assert by_id == [{"rid": "a", "abort_all": False}, {"rid": "b", "abort_all": False}]
    assert all(call.admin for call in DIALECT.abort(["a", "b"]))
    assert DIALECT.abort([]) == []


def test_labels_spare_running_requests() -> None:
    """Both calls that set a version say `abort_all_requests: false`: one of them defaults to true."""  # P24
    (label,) = DIALECT.set_version(3)
    assert json.loads(label.body or b"") == {"new_version": "3", "abort_all_requests": False}
    (load,) = DIALECT.update_from_disk("/w", 4)
    assert json.loads(load.body or b"") == {
        "model_path": "/w",
        "weight_version": "4",
        "flush_cache": True,
        "abort_all_requests": False,
    }
    assert (label.admin, load.admin, DIALECT.flush_cache()[0].admin) == (True, True, True)


def test_probes_never_generate() -> None:
    """Liveness is `/ping`: `/health` runs a generation and fails while paused; both need the data key."""
    assert (DIALECT.ping().path, DIALECT.ping().admin) == ("/ping", False)
    assert (DIALECT.info().path, DIALECT.info().admin) == ("/model_info", False)


@pytest.mark.parametrize(("label", "told"), [("default", "default"), ("7", "7"), (7, "7"), (None, None)])
def test_info(label: object, told: str | None) -> None:
    """The label comes as it was sent; an engine without one says None."""
    info = DIALECT.parse_info(body({"model_path": "m", "weight_version": label}))
    assert info.weight_label == told


def test_loads_are_summed_over_ranks() -> None:
    """Running and waiting requests of every rank count."""  # P9
    ranks = [{"num_running_reqs": 3, "num_waiting_reqs": 1}, {"num_running_reqs": 0, "num_waiting_reqs": 2}]
    assert DIALECT.parse_loads(body({"loads": ranks})) == 6
    assert DIALECT.parse_loads(body({"loads": []})) == 0


@pytest.mark.parametrize(
    "loads", [None, 7, "x", [None], [[]], [{}], [{"num_running_reqs": 1}], [{"num_running_reqs": "a"}]]
)
def test_loads_that_cannot_be_counted(loads: object) -> None:
    """A count that is none is the worker's failure, never 0."""  # P9
    with pytest.raises(WorkerFailure):
        DIALECT.parse_loads(body({"loads": loads}))


@pytest.mark.parametrize("raw", [b"", b"Cache flushed.", b"{}", b'{"success": true, "message": "ok"}', b"null"])
def test_done(raw: bytes) -> None:
    """A 200 is done, whatever text it comes with, unless it says that it is not."""
    DIALECT.parse_done(Reply(200, raw))


@pytest.mark.parametrize(
    ("status", "raw"), [(200, b'{"success": false, "message": "no"}'), (400, b"Flush cache failed."), (503, b"")]
)
def test_not_done(status: int, raw: bytes) -> None:
    """A refusal carries the engine's own words."""
    with pytest.raises(WorkerFailure) as caught:
        DIALECT.parse_done(Reply(status, raw))
    assert status == 503 or caught.value.args[0].split(": ", 1)[1]


def ways(server: Any) -> set[str]:
    """The ways an engine takes weights that are handed to it, by what `/server_info` says."""
    profile = DIALECT.parse_probe([body({"model_path": "m", "weight_version": "1"}), server])
    return {"shm", "cuda_ipc", "distributed"} & set(profile.capabilities)


def test_ways_of_weights() -> None:
    """SGLang's own, unless it says which it has, as the built-in engine does."""
    assert "cuda_ipc" in ways(body({"version": "0.5.23"}))
    assert "cuda_ipc" in ways(WorkerFailure("not_found", ""))
    assert ways(body({"weight_transports": ["shm"]})) == {"shm"}
    assert ways(body({"weight_transports": []})) == set()


@pytest.mark.parametrize(
    ("label", "version", "half"), [("loading 7", None, True), ("7", 7, False), ("default", None, False)]
)
def test_half_loaded_by_the_label(label: str, version: int | None, half: bool) -> None:
    """P24: weights that began to load there and never ended are of no version, and the engine says so itself."""
    info = DIALECT.parse_info(body({"weight_version": label}))
    assert (info.weight_version, info.half_loaded) == (version, half)
