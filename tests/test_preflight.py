"""What would go wrong with some engines: one line each, at the setting it is about, naming the worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollout_svc.config import Config
from rollout_svc.configfile import config_from_mapping
from rollout_svc.engines import DIALECTS, EngineProfile, SGLangDialect
from rollout_svc.errors import ADMIN_KEY, WorkerFailure
from rollout_svc.preflight import Answer, complaints, doubts
from rollout_svc.tensors.experts import Layout

ABLE = EngineProfile(
    dialect="sglang",
    engine_version="0.5.23",
    capabilities=("abort", "abort_all", "count", "freeze_keep_kv", "stream", "weight_version"),
    logprobs="processed",
    model="/models/qwen",
    tokenizer="/models/qwen",
    vocab_size=512,
    context=4096,
    max_running=64,
    weight_label="0",
)


def config(workers: int = 1, *, sampling: Any = None, pause: str = "abort", **settings: Any) -> Config:
    """Make a configuration of that many workers; `settings` are those of each."""
    task = {"name": "t", "prompts": {"push": True}, "sampling": sampling or {}}
    engines = [{"url": f"http://engine-{index}", **settings} for index in range(workers)]
    return config_from_mapping({"workers": engines, "tasks": [task], "pause": {"mode": pause}})


def fleet(*answers: Answer) -> dict[str, Answer]:
    """Give answers to the workers they came from."""
    return {f"w{index}": answer for index, answer in enumerate(answers)}


def test_an_able_fleet_gives_no_cause() -> None:
    """Engines that can do what is asked for, and say the same: not a word."""
    asked = config(2, pause="keep", stream=True, max_batch=64, sampling={"temperature": 0.7, "seed": 1})
    answers = fleet(ABLE, ABLE)
    assert complaints(asked, answers) == []
    assert doubts(asked, answers) == []


def test_an_engine_that_says_little_is_not_blamed_for_it() -> None:
    """What is not known is no complaint: neither its context, nor its model, nor its vocabulary."""
    silent = EngineProfile(dialect="sglang", capabilities=("abort",), logprobs="processed")
    assert complaints(config(2), fleet(ABLE, silent)) == []
    assert doubts(config(2), fleet(ABLE, silent)) == []
    assert complaints(config(3), fleet(ABLE)) == []  # nor are those that have not been asked


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        ("connection", "workers.1.url", "cannot be reached"),
        ("control_timeout", "workers.1.url", "cannot be reached"),
        ("http_503", "workers.1.url", "cannot be reached"),
        ("unauthorized", "workers.1.api_key", "refuses the key"),
        ("forbidden", "workers.1.api_key", "refuses the key"),
        (ADMIN_KEY, "workers.1.admin_key", "refuses the key of control requests"),
        ("wrong_dialect", "workers.1.dialect", "is another engine"),
        ("unfit", "workers.1", "cannot be used as it was started"),
    ],
)
def test_an_engine_that_cannot_be_asked_is_named_with_its_answer(kind: str, path: str, words: str) -> None:
    """Each kind of failure is one line at the setting that mends it, with the worker and what it answered."""
    [problem] = complaints(config(2), fleet(ABLE, WorkerFailure(kind, "it said so")))
    assert problem.path == path
    assert problem.message.startswith(f"w1 at http://engine-1 {words}: ")
    assert "it said so" in problem.message
    assert "\n" not in problem.message


@pytest.mark.parametrize(
    ("asked", "lacks", "path", "words"),
    [
        ({"pause": "keep"}, "freeze_keep_kv", "pause.mode", "cannot be frozen as 'keep' needs: it can abort"),
        ({"stream": True}, "stream", "workers.1.stream", "cannot stream: it can abort"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(asked: Any, lacks: str, path: str, words: str) -> None:
    """A mode or a setting that one engine cannot do, though the other can: one line, with what it can do."""
    lacking = replace(ABLE, capabilities=tuple(name for name in ABLE.capabilities if name != lacks))
    [problem] = complaints(config(2, **asked), fleet(ABLE, lacking))
    assert problem.path == path
    assert problem.message.startswith(f"w1 at http://engine-1 (sglang) {words}")


def test_a_sampling_setting_that_an_engine_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dialect names the setting; the line names the task's place and the worker."""

    class Seedless(SGLangDialect):
        """An engine that takes no seed."""

        def refuses(self, sampling: Any) -> str | None:
            return None if sampling.seed is None else "seed: it takes none"

    monkeypatch.setitem(DIALECTS, "seedless", Seedless)
    answers = fleet(ABLE, replace(ABLE, dialect="seedless"))
    assert complaints(config(2), answers) == []
    [problem] = complaints(config(2, sampling={"seed": 1}), answers)
    assert problem.path == "tasks.0.sampling"
    assert problem.message == "w1 at http://engine-1 (seedless) cannot do seed: it takes none"


def test_a_context_shorter_than_what_is_asked_for_is_named() -> None:
    """Tokens of the context and tokens asked for, both."""
    [doubt] = doubts(config(sampling={"max_tokens": 4097}), fleet(ABLE))
    assert doubt.path == "tasks.0.sampling.max_tokens"
    assert "a context of 4096 tokens, the prompt's included: 4097 are asked for" in doubt.message
    assert doubts(config(sampling={"max_tokens": 4096}), fleet(ABLE)) == []
    assert complaints(config(sampling={"max_tokens": 4097}), fleet(ABLE)) == []  # the engine ends at its context


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "/models/llama"}, "has model '/models/llama', w0 at http://engine-0 has '/models/qwen'"),
        ({"tokenizer": "gpt2"}, "has tokenizer 'gpt2', w0 at http://engine-0 has '/models/qwen'"),
        ({"vocab_size": 7}, "has vocabulary 7, w0 at http://engine-0 has 512"),
    ],
)
def test_a_worker_that_disagrees_is_named(change: Any, words: str) -> None:
    """The one that is unlike most, wherever it stands, with what both answered."""
    odd = replace(ABLE, **change)
    [problem] = complaints(config(3), fleet(ABLE, odd, ABLE))
    assert (problem.path, problem.message) == ("workers.1.url", f"w1 at http://engine-1 {words}")
    [problem] = complaints(config(3), fleet(odd, ABLE, ABLE))
    assert problem.path == "workers.0.url"
    [problem] = complaints(config(2), fleet(ABLE, odd))  # of two, the first is believed
    assert problem.path == "workers.1.url"


def test_one_model_may_have_many_names() -> None:
    """Other folders on other machines, the names of another dialect, and weights from elsewhere: no complaint."""
    mounted = replace(ABLE, model="/mnt/models/qwen", tokenizer="/mnt/models/qwen")
    served = replace(ABLE, dialect="vllm", model="policy")
    updated = replace(ABLE, model="/weights/step-7", weight_label="7")
    assert complaints(config(4), fleet(ABLE, mounted, served, updated)) == []


def test_weights_of_several_labels_are_doubtful() -> None:
    """It works, and the odd one may wait for an update: said before it is wondered at."""
    [doubt] = doubts(config(3), fleet(ABLE, replace(ABLE, weight_label="7"), replace(ABLE, weight_label=None)))
    assert doubt.path == "workers.1"
    assert "w1 at http://engine-1 has weights '7', w0 at http://engine-0 has '0'" in doubt.message


def test_what_an_engine_warns_of_is_handed_on() -> None:
    """Its dialect's own words, with its name; and of vLLM, that its control plane is open to anybody."""
    [doubt] = doubts(config(), fleet(replace(ABLE, warnings=("one of two processes",))))
    assert (doubt.path, doubt.message) == ("workers.0", "w0 at http://engine-0: one of two processes")
    [doubt] = doubts(config(), fleet(replace(ABLE, dialect="vllm")))
    assert doubt.path == "workers.0.url"
    assert "can stop it, freeze it and change its weights" in doubt.message
    assert doubts(config(), fleet(replace(ABLE, dialect="vllm", capabilities=("abort", "stream")))) == []


@pytest.mark.parametrize(
    ("meaning", "sampling", "words"),
    [
        ("raw", {"temperature": 0.7}, "its logprobs are of the model, before temperature 0.7"),
        ("raw", {"top_p": 0.9, "top_k": 5}, "its logprobs are of the model, before top_p 0.9, top_k 5"),
        ("unknown", {"temperature": 0.7}, "its logprobs are of nobody knows what, and there is temperature 0.7"),
        ("raw", {}, None),
        ("unknown", {}, None),
        ("processed", {"temperature": 0.7, "top_p": 0.9}, None),
    ],
)
def test_logprobs_of_another_distribution_are_doubtful(meaning: Any, sampling: Any, words: str | None) -> None:
    """Raw logprobs of tokens that were drawn from a bent distribution: a warning for each task that bends it."""
    found = doubts(config(sampling=sampling), fleet(replace(ABLE, logprobs=meaning)))
    assert [(doubt.path, words in doubt.message) for doubt in found if words] == (
        [("tasks.0.sampling", True)] if words else []
    )
    assert bool(found) == (words is not None)


def test_more_than_an_engine_runs_at_once_is_doubtful() -> None:
    """`max_batch` beyond what the engine says of itself: both numbers."""
    [doubt] = doubts(config(max_batch=65), fleet(ABLE))
    assert (doubt.path, doubt.message.count("64"), doubt.message.count("65")) == ("workers.0.max_batch", 1, 1)


# -- routed experts ------------------------------------------------------------------------------------------

ROUTING = replace(ABLE, capabilities=(*ABLE.capabilities, "experts"), experts=Layout(8, 2, 4, (1, 2, 3)))


def with_experts(workers: int = 1, *, sampling: Any = None, engines: Any = None, **experts: Any) -> Config:
    """Make a configuration that wants routed experts."""
    task = {"name": "t", "prompts": {"push": True}, "sampling": sampling or {}}
    urls = [{"url": f"http://engine-{index}", "engines": engines} for index in range(workers)]
    return config_from_mapping({"workers": urls, "tasks": [task], "experts": {"enabled": True, **experts}})


def test_an_engine_that_tells_all_of_its_routing_gives_no_cause() -> None:
    """Nothing has to be set; what is set may say the same."""
    assert complaints(with_experts(), fleet(ROUTING)) == []
    same = with_experts(num_experts=8, top_k=2, layers=4, moe_layers=[3, 1, 2])
    assert complaints(same, fleet(ROUTING)) == []
    assert complaints(with_experts(layers=4, top_k=2), fleet(replace(ROUTING, experts=None))) == []


@pytest.mark.parametrize(
    ("dialect", "words"),
    [
        ("sglang", "it does not say that it was started with --enable-return-routed-experts"),
        ("lmdeploy", "it does not say that it was started with --enable-return-routed-experts"),
        ("vllm", "--enable-return-routed-experts and with VLLM_SERVER_DEV_MODE=1, or cannot say so"),
    ],
)
def test_one_that_returns_no_routed_experts_is_refused_by_name(dialect: str, words: str) -> None:
    """The switch is named, and only where they are wanted of anybody."""
    lacks = replace(ABLE, dialect=dialect)
    [problem] = complaints(with_experts(2), fleet(ROUTING, lacks))
    assert problem.path == "experts.enabled"
    assert problem.message.startswith(f"w1 at http://engine-1 ({dialect}) returns no routed experts: ")
    assert words in problem.message
    assert complaints(with_experts(2, sampling={"return_routed_experts": False}), fleet(ROUTING, lacks)) == []
    assert complaints(config(2), fleet(ROUTING, lacks)) == []


def test_a_router_is_refused_by_name() -> None:
    """It would drop the question, whatever the engines behind it can."""
    [problem] = complaints(with_experts(engines=["http://behind"]), fleet(ABLE))
    assert problem.path == "experts.enabled"
    assert "the router drops what asks for them: its engines have to be workers of their own" in problem.message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"num_experts": 16}, "(sglang) has 8, and 16 is set"),
        ({"top_k": 3}, "(sglang) has 2, and 3 is set"),
        ({"layers": 5}, "(sglang) has 4, and 5 is set"),
        ({"moe_layers": [0, 1]}, "(sglang) has [1, 2, 3], and [0, 1] is set"),
    ],
)
def test_settings_that_contradict_the_engine_are_refused(setting: Any, words: str) -> None:
    """At the setting, with both values."""
    [problem] = complaints(with_experts(**setting), fleet(ROUTING))
    assert problem.path == f"experts.{next(iter(setting))}"
    assert words in problem.message


def test_what_nobody_says_has_to_be_set() -> None:
    """SGLang sends numbers without a shape: each of the two that it takes is named; the others send one."""
    silent = replace(ROUTING, experts=None)
    problems = complaints(with_experts(), fleet(silent))
    assert [problem.path for problem in problems] == ["experts.layers", "experts.top_k"]
    assert all("without a shape" in problem.message for problem in problems)
    assert [p.path for p in complaints(with_experts(layers=4), fleet(silent))] == ["experts.top_k"]
    for dialect in ("vllm", "lmdeploy"):
        assert complaints(with_experts(), fleet(replace(silent, dialect=dialect))) == []


def test_a_layer_that_is_not_there_is_refused() -> None:
    """What is set of the layers has to fit what the engine says of them."""
    says_layers = replace(ROUTING, experts=Layout(8, 2, 4))
    [problem] = complaints(with_experts(moe_layers=[1, 4]), fleet(says_layers))
    assert (problem.path, "there is no 4" in problem.message) == ("experts.moe_layers", True)


def test_engines_of_different_models_are_named() -> None:
    """Routing of two shapes cannot be trained on together."""
    many = tuple(range(3, 61))
    other = replace(ROUTING, experts=Layout(8, 4, 61, many))
    problems = complaints(with_experts(2), fleet(ROUTING, other))
    assert [problem.message.partition(" has ")[2] for problem in problems] == [
        "experts a token 4, w0 at http://engine-0 has 2",
        "layers 61, w0 at http://engine-0 has 4",
        "layers with experts '58 of them from 3 to 60', w0 at http://engine-0 has '[1, 2, 3]'",
    ]
    assert complaints(config(2), fleet(ROUTING, other)) == []
