"""What would go wrong with these engines: their own answers, held against the settings and against each other.

Invariants:

- Pure: what engines answered in, lines out; the start of the service and `serve --preflight` say the same.
- A complaint is something that fails, a doubt something that works and should not be left so. Each is one line, at the
  dotted path of the setting it is about, and names the worker and what it answered.
- What an engine does not say is never held against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from rollout_svc.config import Config, SamplingConfig
from rollout_svc.engines import DIALECTS, EngineProfile
from rollout_svc.errors import ADMIN_KEY, Problem, WorkerFailure
from rollout_svc.tensors.layouts import configured, differences, filled

__all__ = ["ROUTING_FACTS", "Answer", "Answers", "complaints", "doubts", "lacking", "last_part", "wants_experts"]

_KEY_KINDS: Final = frozenset({"unauthorized", "forbidden"})
_FREEZE: Final = "freeze_keep_kv"
# What vLLM's development mode brings, on routes that no key guards (`/abort_requests`, `/pause`, `/collective_rpc`, …).
_UNGUARDED: Final = frozenset({"abort_all", "disk", "freeze_drop_kv", "freeze_keep_kv", "set_version"})

_SHAPELESS: Final = frozenset({"sglang"})  # dialects whose routed experts come as numbers in a row
_FEW: Final = 8  # layers that are named one by one
_EXPERTS_SWITCH: Final = "--enable-return-routed-experts"

Answer = EngineProfile | WorkerFailure
Answers = Mapping[str, Answer]
"""What each worker's engine says it is, or why it did not, by worker id in the order of the configuration."""


def complaints(config: Config, answers: Answers) -> list[Problem]:
    """Name everything that would fail.

    Args:
        config: the settings.
        answers: of all workers, or of those that have been asked: the others are not spoken of.
    """
    found: list[Problem] = []
    profiles = _profiles(answers)
    names = _names(config)
    for worker_id, answer in answers.items():
        if isinstance(answer, WorkerFailure):
            found.append(_failed(names[worker_id], answer))
    for worker_id, profile in profiles.items():
        name = names[worker_id]
        worker = config.workers[name.index]
        for path, words in lacking(config, worker.stream, profile, routed=bool(worker.behind)):
            found.append(Problem(path or name.at("stream"), f"{name} {words}"))
    found += _disagreeing(names, profiles)
    if wants_experts(config):
        for what, read in ROUTING_FACTS:
            found += _odd(names, profiles, what, read)
    return found


def doubts(config: Config, answers: Answers) -> list[Problem]:
    """Name everything that works and should not be left so; arguments as for `complaints`."""
    found: list[Problem] = []
    profiles = _profiles(answers)
    names = _names(config)
    for worker_id, profile in profiles.items():
        name = names[worker_id]
        found += [Problem(name.path, f"{name}: {warning}") for warning in profile.warnings]
        if profile.dialect == "vllm" and _UNGUARDED & set(profile.capabilities):
            words = "whoever reaches its port can stop it, freeze it and change its weights: vLLM wants no key for that"
            found.append(Problem(name.at("url"), f"{name}: {words}"))
        found += _short_context(config, name, profile)
        found += _doubtful_logprobs(config, name, profile)
        batch = config.workers[name.index].max_batch
        if batch is not None and profile.max_running is not None and batch > profile.max_running:
            words = f"it runs {profile.max_running} requests at once, max_batch says {batch}: the rest queues there"
            found.append(Problem(name.at("max_batch"), f"{name}: {words}"))
    found += _labels(names, profiles)
    return found


class _Name:
    """A worker as lines name it: by its id and address, and by its place in the configuration."""

    __slots__ = ("index", "path", "text")

    def __init__(self, worker_id: str, index: int, url: str) -> None:
        self.index = index
        self.path = f"workers.{index}"
        self.text = f"{worker_id} at {url}"

    def __str__(self) -> str:
        return self.text

    def at(self, key: str) -> str:
        """The dotted path of one of its settings."""
        return f"{self.path}.{key}"


def _names(config: Config) -> dict[str, _Name]:
    places = enumerate(worker.url or "an address of its own" for worker in config.workers)
    return {f"w{index}": _Name(f"w{index}", index, place) for index, place in places}


def _profiles(answers: Answers) -> dict[str, EngineProfile]:
    return {name: answer for name, answer in answers.items() if isinstance(answer, EngineProfile)}


def _fact(name: str) -> Callable[[EngineProfile], str | int | None]:
    def read(profile: EngineProfile) -> str | int | None:
        value = getattr(profile.experts, name, None)
        return _shown(value) if isinstance(value, tuple) else value

    return read


ROUTING_FACTS: Final = tuple(
    (noun, _fact(name))
    for name, noun in (
        ("num_experts", "experts a layer"),
        ("top_k", "experts a token"),
        ("layers", "layers"),
        ("moe_layers", "layers with experts"),
    )
)
"""What engines whose routing is trained on have to have in common: a noun, and how to read it of a profile."""


# -- one engine ----------------------------------------------------------------------------------------------


def _failed(name: _Name, failure: WorkerFailure) -> Problem:
    """Say which setting is to blame for an engine that could not be asked."""
    if failure.kind == "wrong_dialect":
        return Problem(name.at("dialect"), f"{name} is another engine: {failure.message}")
    if failure.kind == ADMIN_KEY:
        return Problem(name.at("admin_key"), f"{name} refuses the key of control requests: {failure.message}")
    if failure.kind in _KEY_KINDS:
        return Problem(name.at("api_key"), f"{name} refuses the key: {failure}")
    if failure.kind == "unfit":
        return Problem(name.path, f"{name} cannot be used as it was started: {failure.message}")
    return Problem(name.at("url"), f"{name} cannot be reached: {failure}")


def lacking(
    config: Config,
    stream: bool,
    profile: EngineProfile,
    *,
    routed: bool = False,
    withdrawn: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[tuple[str | None, str]]:
    """Name what is asked for that an engine cannot do.

    Args:
        config: the settings.
        stream: the worker's.
        profile: what its engine says it is.
        routed: generation passes a router there.
        withdrawn: capabilities it said it has, and why that is not believed.

    Yields:
        The setting's path (None: the worker's `stream`) and the words.
    """
    who = f"({profile.dialect})"
    can = ", ".join(sorted(profile.capabilities)) or "nothing"
    if config.pause.mode == "keep" and _FREEZE not in profile.capabilities:
        yield "pause.mode", f"{who} cannot be frozen as 'keep' needs: it can {can}"
    if stream and "stream" not in profile.capabilities:
        yield None, f"{who} cannot stream: it can {can}"
    dialect = DIALECTS.get(profile.dialect)
    for index, task in enumerate(config.tasks):
        if dialect is not None and (refused := dialect().refuses(task.sampling)):
            yield f"tasks.{index}.sampling", f"{who} cannot do {refused}"
    if wants_experts(config):
        for path, words in _without_experts(config, profile, routed, withdrawn.get("experts")):
            yield path, f"{who} {words}"


def wants_experts(config: Config) -> bool:
    """Whether any request of training asks for routed experts."""
    return config.experts.enabled and any(task.sampling.return_routed_experts for task in config.tasks)


def _without_experts(
    config: Config, profile: EngineProfile, routed: bool, withdrawn: str | None
) -> Iterator[tuple[str, str]]:
    """Why an engine's routed experts cannot be had, or could not be read: a setting's path and the words."""
    if "experts" not in profile.capabilities:
        if routed:
            why = "the router drops what asks for them: its engines have to be workers of their own"
        elif withdrawn is not None:
            why = withdrawn
        else:
            also = " and with VLLM_SERVER_DEV_MODE=1, or cannot say so" if profile.dialect == "vllm" else ""
            why = f"it does not say that it was started with {_EXPERTS_SWITCH}{also}"
        yield "experts.enabled", f"returns no routed experts: {why}"
        return
    set_here = configured(config.experts)
    for name, ours, theirs in differences(set_here, profile.experts):
        yield f"experts.{name}", f"has {_shown(theirs)}, and {_shown(ours)} is set"
    known = filled(set_here, profile.experts)
    for name in ("layers", "top_k") if profile.dialect in _SHAPELESS else ():
        if getattr(known, name) is None:
            yield f"experts.{name}", "sends routed experts without a shape and does not say this: it has to be set"
    if known.moe_layers and known.layers is not None and known.moe_layers[-1] >= known.layers:
        yield "experts.moe_layers", f"has {known.layers} layers, counted from 0: there is no {known.moe_layers[-1]}"


def _shown(value: Any) -> str:
    """A field of a layout, for people: of many layers the first, the last and how many."""
    if isinstance(value, tuple) and len(value) > _FEW:
        return f"{len(value)} of them from {value[0]} to {value[-1]}"
    return str(list(value) if isinstance(value, tuple) else value)


def _short_context(config: Config, name: _Name, profile: EngineProfile) -> Iterator[Problem]:
    """An engine ends an answer at its context, as if that were the budget."""
    for index, task in enumerate(config.tasks):
        if profile.context is not None and profile.context < task.sampling.max_tokens:
            words = f"has a context of {profile.context} tokens, the prompt's included: {task.sampling.max_tokens}"
            at = f"tasks.{index}.sampling.max_tokens"
            yield Problem(at, f"{name} ({profile.dialect}) {words} are asked for")


def _doubtful_logprobs(config: Config, name: _Name, profile: EngineProfile) -> Iterator[Problem]:
    """Logprobs of another distribution than the tokens were drawn from: an importance ratio of them is off."""
    if profile.logprobs == "processed":
        return
    for index, task in enumerate(config.tasks):
        bends = _bends(task.sampling)
        if not bends:
            continue
        meaning = "are of the model, before" if profile.logprobs == "raw" else "are of nobody knows what, and there is"
        yield Problem(f"tasks.{index}.sampling", f"{name}: its logprobs {meaning} {bends}")


def _bends(sampling: SamplingConfig) -> str:
    """Name the settings that make the distribution that is drawn from another than the model's."""
    bends = [
        ("temperature", sampling.temperature, sampling.temperature != 1),
        ("top_p", sampling.top_p, sampling.top_p < 1),
        ("top_k", sampling.top_k, sampling.top_k is not None),
    ]
    return ", ".join(f"{key} {value:g}" for key, value, bent in bends if bent and value is not None)


# -- all of them ---------------------------------------------------------------------------------------------


def _disagreeing(names: Mapping[str, _Name], profiles: Mapping[str, EngineProfile]) -> Iterator[Problem]:
    """One line for each worker that answers something else than most do.

    Models are compared among engines of one dialect and one weight label: each has its own way to name what it serves,
    and weights that are loaded from a path change the name. Of paths only the last part is: machines differ.
    """
    groups = sorted({(profile.dialect, profile.weight_label or "") for profile in profiles.values()})
    for group in groups:
        alike = {w: p for w, p in profiles.items() if (p.dialect, p.weight_label or "") == group}
        yield from _odd(names, alike, "model", lambda profile: profile.model)
    yield from _odd(names, profiles, "tokenizer", lambda profile: profile.tokenizer)
    yield from _odd(names, profiles, "vocabulary", lambda profile: profile.vocab_size)


def _odd(
    names: Mapping[str, _Name],
    profiles: Mapping[str, EngineProfile],
    what: str,
    read: Callable[[EngineProfile], str | int | None],
) -> Iterator[Problem]:
    said = {worker_id: value for worker_id, profile in profiles.items() if (value := read(profile)) is not None}
    if not said:
        return
    usual = Counter(last_part(value) for value in said.values()).most_common(1)[0][0]  # the first of equals
    witness = next(worker_id for worker_id, value in said.items() if last_part(value) == usual)
    for worker_id, value in said.items():
        if last_part(value) != usual:
            name = names[worker_id]
            words = f"{name} has {what} {value!r}, {names[witness]} has {said[witness]!r}"
            yield Problem(name.at("url"), words)


def last_part(value: str | int) -> str | int:
    """What is compared of a name: of paths only the last part, for machines differ."""
    return PurePosixPath(value).name if isinstance(value, str) else value


def _labels(names: Mapping[str, _Name], profiles: Mapping[str, EngineProfile]) -> Iterator[Problem]:
    """Weights of several labels: those that cannot be brought along stay out of traffic until the next update."""
    said = {worker_id: profile.weight_label for worker_id, profile in profiles.items() if profile.weight_label}
    for worker_id, label in said.items():
        first = next(iter(said))
        if label != said[first]:
            words = f"{names[worker_id]} has weights {label!r}, {names[first]} has {said[first]!r}"
            yield Problem(names[worker_id].path, f"{words}: it may stay out of traffic until the next update")
