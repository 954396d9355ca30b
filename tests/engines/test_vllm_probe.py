"""What a vLLM server turns out to be when its worker registers."""

from typing import Any

import pytest

from rollout_svc.engines import Call, EngineProfile, Reply, VLLMDialect
from rollout_svc.errors import WorkerFailure
from tests.engines.vllm_bodies import answer, as_reply

LOST = WorkerFailure("control_timeout", "no answer in 2.00 s")
NOT_FOUND = as_reply({"detail": "Not Found"}, 404)
GAUGES = Reply(200, b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_waiting{engine="0"} 0.0\n')
ROUTES = (
    *("/inference/v1/generate", "/inference/v1/abort_requests", "/pause", "/resume", "/abort_requests"),
    *("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info", "/server_info"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
)
EVERYTHING = {
    *("abort", "abort_all", "count", "disk", "flush", "freeze_drop_kv", "freeze_keep_kv"),
    *("set_version", "stream", "weight_version"),
}


BROADCAST = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


def config(
    mode: str = "raw_logprobs",
    *,
    processes: int = 1,
    experts: bool = False,
    transfer: str | None = None,
    unpickles: bool = True,
    sizes: dict[str, int] | None = None,
    **sections: Any,
) -> Reply:
    """Make what `/server_info` answers."""
    found = {
        "model_config": {"model": "/m/tiny", "tokenizer": "/m/tiny", "max_model_len": 2048, "logprobs_mode": mode},
        "scheduler_config": {"max_num_seqs": 8},
        "parallel_config": {"_api_process_count": processes, **(sizes or {})},
        "weight_transfer_config": None if transfer is None else {"backend": transfer},
        "aux_output_config": {"enable_return_routed_experts": experts},
    }
    env = {"VLLM_ALLOW_INSECURE_SERIALIZATION": unpickles}
    return as_reply({"vllm_config": found | sections, "vllm_env": env})


def models(**fields: Any) -> Reply:
    """Make what `/v1/models` answers: an adapter, then its base."""
    card = {"id": "tiny", "object": "model", "owned_by": "vllm", "root": "/m/tiny", "parent": None}
    adapter = {**card, "id": "adapter", "parent": "tiny"}
    return as_reply({"object": "list", "data": [adapter, {**card, "max_model_len": 2048, **fields}]})


GOOD: dict[str, Reply | WorkerFailure] = {
    "version": as_reply({"version": "0.32.0"}),
    "models": models(),
    "abort": Reply(200, b""),
    "label": as_reply({"weight_version": "default"}),
    "openapi": as_reply({"paths": {path: {} for path in ROUTES}}),
    "metrics": GAUGES,
    "info": config(),
}


def probed(**changed: Reply | WorkerFailure) -> EngineProfile:
    """Read the good answers, but for some."""
    return VLLMDialect().parse_probe(list((GOOD | changed).values()))


def refused(**changed: Reply | WorkerFailure) -> WorkerFailure:
    """Read answers that must be refused."""
    with pytest.raises(WorkerFailure) as caught:
        probed(**changed)
    return caught.value


def test_the_calls() -> None:
    """One for each answer; none of them generates, or could abort anything."""
    calls = VLLMDialect().probe()
    assert len(calls) == len(GOOD)
    assert [call for call in calls if call.method != "GET"] == [
        Call("POST", "/inference/v1/abort_requests", b'{"request_ids":["generate-tokens-probe"]}')
    ]


def test_all_of_it() -> None:
    """What a server with both switches is."""
    assert probed() == EngineProfile(
        dialect="vllm",
        engine_version="0.32.0",
        capabilities=tuple(sorted(EVERYTHING)),
        logprobs="raw",
        model="tiny",
        tokenizer="/m/tiny",
        context=2048,
        max_running=8,
        weight_label="default",
    )


@pytest.mark.parametrize(
    ("routes", "backend", "able"),
    [
        (ROUTES, "nccl", True),
        (ROUTES, "ipc", False),
        (tuple(set(ROUTES) - {BROADCAST[0]}), "nccl", False),
        (ROUTES, None, False),
    ],
)
def test_weights_are_broadcast_to_one_that_was_started_for_it(
    routes: tuple[str, ...], backend: str | None, able: bool
) -> None:
    """By its configuration and its routes, both."""
    transfer = None if backend is None else {"backend": backend}
    openapi = as_reply({"paths": {path: {} for path in routes}})
    profile = probed(openapi=openapi, info=config(weight_transfer_config=transfer))
    assert ("distributed" in profile.capabilities) is able


def test_every_process_that_has_weights_is_a_rank() -> None:
    """Tensor-, pipeline- and data-parallel ones; what it does not say is one."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4}
    assert probed(info=config(parallel_config=sizes)).ranks == 24
    assert probed(info=config(parallel_config={"tensor_parallel_size": 2})).ranks == 2
    assert probed(info=NOT_FOUND).ranks == 1


def test_what_logprobs_are_of() -> None:
    """By the flag; logits are refused by its name, and silence is said."""
    assert probed(info=config("processed_logprobs")).logprobs == "processed"
    failure = refused(info=config("raw_logits"))
    assert failure.kind == "unfit"
    assert "--logprobs-mode raw_logits" in str(failure)
    for silent in (NOT_FOUND, as_reply({"vllm_config": "text"}), Reply(200, b"{"), as_reply([])):
        profile = probed(info=silent)
        assert (profile.logprobs, profile.max_running, profile.tokenizer) == ("unknown", None, None)
        assert "--logprobs-mode" in profile.warnings[0]


def test_without_scale_out() -> None:
    """The flag is named."""
    failure = refused(abort=as_reply({"error": {"message": "Scale-out endpoints are disabled."}}, 403))
    assert failure.kind == "unfit"
    assert "--enable-scale-out" in str(failure)
    assert "0.32.0" in str(failure)


def test_an_old_engine() -> None:
    """One that has no such route is told which it needs."""
    failure = refused(abort=NOT_FOUND, version=as_reply({"version": "0.20.2"}))
    assert failure.kind == "unfit"
    assert "0.32" in str(failure)
    assert "0.20.2" in str(failure)


def test_without_development_mode() -> None:
    """It generates and aborts by id; what is missing is said, with the switch."""
    absent = dict.fromkeys(("label", "info"), NOT_FOUND)
    profile = probed(**absent, openapi=as_reply({"paths": {path: {} for path in ROUTES[:2]}}))
    assert set(profile.capabilities) == {"abort", "count", "stream"}
    assert profile.weight_label is None
    assert any("VLLM_SERVER_DEV_MODE=1" in warning for warning in profile.warnings)


def test_a_label_nobody_can_set_says_nothing() -> None:
    """Without the development mode every answer says `default`: it is no label."""  # P7
    dialect = VLLMDialect()
    reply = answer([1, 2], "stop", weight_versions=[{"version": "default", "start": 0, "end": 2}])
    assert dialect.parse_generate(reply).labelled
    dialect.parse_probe(list((GOOD | {"label": NOT_FOUND}).values()))
    assert (dialect.parse_generate(reply).labelled, dialect.parse_generate(reply).spans) == (False, ())
    assert dialect.set_version(3) == []
    dialect.parse_probe(list(GOOD.values()))
    assert dialect.parse_generate(reply).labelled


@pytest.mark.parametrize(
    ("absent", "lost"),
    [
        ("/pause", {"freeze_keep_kv", "freeze_drop_kv"}),
        ("/resume", {"freeze_keep_kv", "freeze_drop_kv"}),
        ("/abort_requests", {"abort_all"}),
        ("/collective_rpc", {"disk"}),
        ("/reset_prefix_cache", {"flush"}),
        ("/update_weight_version", {"disk", "set_version", "weight_version"}),
    ],
)
def test_a_capability_needs_its_routes(absent: str, lost: set[str]) -> None:
    """Engines drift: what documentation does not list is not there."""
    openapi = as_reply({"paths": {path: {} for path in ROUTES if path != absent}})
    assert EVERYTHING - set(probed(openapi=openapi).capabilities) == lost


@pytest.mark.parametrize("openapi", [NOT_FOUND, as_reply({"paths": None}), Reply(200, b"x")])
def test_without_documentation(openapi: Reply) -> None:
    """`--disable-fastapi-docs`: the switches were seen by one route each."""
    assert set(probed(openapi=openapi).capabilities) == EVERYTHING


@pytest.mark.parametrize("metrics", [NOT_FOUND, Reply(200, b"")])
def test_without_gauges(metrics: Reply) -> None:
    """It cannot count, and says so."""  # P9
    profile = probed(metrics=metrics)
    assert EVERYTHING - set(profile.capabilities) == {"count"}
    assert any("num_requests" in warning for warning in profile.warnings)


def test_several_api_processes() -> None:
    """An abort of everything reaches one of them: it is not to be relied on."""  # P9
    profile = probed(info=config(processes=4))
    assert EVERYTHING - set(profile.capabilities) == {"abort_all"}
    assert any("4 API processes" in warning for warning in profile.warnings)


def test_routed_experts() -> None:
    """By the server's flag alone."""
    assert set(probed(info=config(experts=True)).capabilities) == EVERYTHING | {"experts"}


def test_weights_by_handles() -> None:
    """Where the backend is `ipc`, the routes are there, and it unpickles what that is sent; else not, and said."""
    assert set(probed(info=config(transfer="ipc")).capabilities) == EVERYTHING | {"cuda_ipc"}
    assert set(probed(info=config(transfer="nccl")).capabilities) == EVERYTHING | {"distributed"}
    without = as_reply({"paths": {path: {} for path in ROUTES if path != "/finish_weight_update"}})
    assert set(probed(info=config(transfer="ipc"), openapi=without).capabilities) == EVERYTHING
    refusing = probed(info=config(transfer="ipc", unpickles=False))
    assert set(refusing.capabilities) == EVERYTHING
    assert any("VLLM_ALLOW_INSECURE_SERIALIZATION=1" in warning for warning in refusing.warnings)
    assert "cuda_ipc" not in probed(info=config(transfer="ipc"), label=NOT_FOUND).capabilities


def test_its_workers() -> None:
    """Each takes weights of its own: tensor, pipeline and data parallel; one where it does not say."""
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 2}
    assert probed(info=config(sizes=sizes)).ranks == 12
    assert probed(info=NOT_FOUND).ranks == 1


@pytest.mark.parametrize(
    "version",
    [NOT_FOUND, as_reply({"error": "Unauthorized"}, 401), Reply(200, b"{"), as_reply([]), as_reply({"version": 7})],
)
def test_another_engine(version: Reply) -> None:
    """It is told by what it answered."""
    failure = refused(version=version)
    assert failure.kind == "wrong_dialect"
    assert f"HTTP {version.status}" in str(failure)


@pytest.mark.parametrize("found", [NOT_FOUND, as_reply({"data": []}), as_reply({"data": [7]}), Reply(200, b"x")])
def test_a_server_without_a_model(found: Reply) -> None:
    """A version alone is no vLLM."""
    assert refused(models=found).kind == "wrong_dialect"


@pytest.mark.parametrize("name", GOOD)
def test_no_answer_is_no_other_engine(name: str) -> None:
    """What kept a call from its answer is the failure: a worker that was late once is asked again, whole."""
    assert refused(**{name: LOST}) is LOST


@pytest.mark.parametrize("name", ["models", "abort"])
def test_a_wrong_key(name: str) -> None:
    """Is told as such, with what was answered."""
    failure = refused(**{name: as_reply({"error": "Unauthorized"}, 401)})
    assert (failure.kind, failure.hard) == ("unauthorized", True)


def test_a_dead_core() -> None:
    """A server whose core has died answers 500: it is not fit now, and may be later."""
    assert refused(abort=Reply(500, b"")).kind == "http_500"
    assert refused(label=Reply(500, b"")).kind == "http_500"


@pytest.mark.parametrize("value", [None, "x", 0, -1, True, 1.5])
def test_limits_that_are_no_numbers_are_unknown(value: object) -> None:
    """A limit is an integer above 0, or is not known."""
    assert probed(models=models(max_model_len=value)).context is None
