"""Plugins: found by name or by path, made with their options, and every mistake told at its dotted path."""

import pickle
from typing import Any

import pytest

from rollout_svc.config import AgentConfig, JudgerConfig, PluginConfig
from rollout_svc.errors import ConfigError
from rollout_svc.plugins import PluginSpec, construct, load_attr, resolve
from tests.support import plugged

HERE = "tests.support.plugged"


def problem_of(error: pytest.ExceptionInfo[ConfigError]) -> tuple[str, str]:
    """The one problem an error carries."""
    [problem] = error.value.problems
    return problem.path, problem.message


def config(**fields: Any) -> PluginConfig:
    return PluginConfig.model_validate(fields)


def test_a_path_needs_no_registration() -> None:
    """`module:attr` is taken as it is; the keys that are not ours are the plugin's options."""
    spec = resolve(config(path="m:a.b", need=1), "agents", "tasks.0.agent")
    assert spec == PluginSpec("m:a.b", {"need": 1})


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("agents", "single_turn", {}),
        ("judgers", "exact", {"strip": False}),
        ("judgers", "regex", {"pattern": "x"}),
        ("judgers", "function", {"function": "tests.support.judgers:plain"}),
    ],
)
def test_what_comes_with_the_service_is_registered(kind: Any, name: str, options: dict[str, Any]) -> None:
    """Every name of the documentation resolves to something that can be made."""
    made = construct(resolve(config(name=name, **options), kind, "p"), "p")
    assert callable(getattr(made, "run" if kind == "agents" else "judge"))


@pytest.mark.parametrize(("kind", "name"), [("agents", "exact"), ("judgers", "single_turn"), ("judgers", "nobody")])
def test_an_unknown_name_is_told_with_those_there_are(kind: Any, name: str) -> None:
    """The error stands at the name and lists what is installed of that kind."""  # P35
    with pytest.raises(ConfigError) as caught:
        resolve(config(name=name), kind, "tasks.3.x")
    path, message = problem_of(caught)
    assert path == "tasks.3.x.name"
    assert repr(name) in message
    known = message.partition("there are: ")[2].split(", ")
    assert set(known) >= ({"single_turn"} if kind == "agents" else {"exact", "function", "regex"})
    assert known == sorted(known)


def test_the_services_own_keys_are_no_options() -> None:
    """A task's own settings of an agent or judger do not reach its constructor."""
    judger = JudgerConfig.model_validate({"name": "regex", "pattern": "x", "timeout_s": 5.0, "concurrency": 2})
    assert resolve(judger, "judgers", "p").options == {"pattern": "x"}
    agent = AgentConfig.model_validate({"name": "single_turn", "on_pause": "park"})
    assert resolve(agent, "agents", "p").options == {}


def test_options_are_copies() -> None:
    """What a plugin does to its options changes no setting."""
    given = config(path=f"{HERE}:Picky", need=1, want=[1])
    made = construct(resolve(given, "agents", "p"), "p")
    made.want.append(2)
    assert given.options == {"need": 1, "want": [1]}
    assert resolve(given, "agents", "p").options["want"] == [1]


def test_a_spec_travels() -> None:
    """Another process makes its own plugin from the same spec."""
    spec = PluginSpec(f"{HERE}:Picky", {"need": 1})
    assert construct(pickle.loads(pickle.dumps(spec)), "p").need == 1  # noqa: S301 - our own bytes


def test_a_class_is_made_and_anything_else_is_used_as_it_is() -> None:
    """An instance, function or module attribute without options is the plugin itself."""
    assert isinstance(construct(PluginSpec(f"{HERE}:Plain", {}), "p"), plugged.Plain)
    assert construct(PluginSpec(f"{HERE}:INSTANCE", {}), "p") is plugged.INSTANCE
    assert isinstance(construct(PluginSpec(f"{HERE}:Outer.Inner", {}), "p"), plugged.Outer.Inner)
    assert load_attr(f"{HERE}:Outer.Inner") is plugged.Outer.Inner


@pytest.mark.parametrize(
    ("target", "options", "told"),
    [
        ("no_such_module:a", {}, "ModuleNotFoundError"),
        (f"{HERE}:Nothing", {}, "AttributeError"),
        (f"{HERE}:Plain.", {}, "AttributeError"),
        (f"{HERE}:", {}, "AttributeError"),
        ("tests.support.unimportable:a", {}, "not today"),
        ("tests.support.exits:a", {}, "SystemExit"),
        (f"{HERE}:Picky", {}, "need"),
        (f"{HERE}:Refuses", {"need": 7}, "7 will not do"),
        (f"{HERE}:INSTANCE", {"need": 1}, "takes no options (need)"),
        ("builtins:int", {"need": 1}, "builtins:int"),
        ("builtins:dict.fromkeys", {"need": 1}, "takes no options (need)"),
        ("builtins:type", {}, "builtins:type"),
    ],
)
def test_every_mistake_is_a_config_error_at_its_path(target: str, options: dict[str, Any], told: str) -> None:
    """Not there, fails on import, refuses its options: one problem, at the path the user wrote."""  # P35
    with pytest.raises(ConfigError) as caught:
        construct(PluginSpec(target, options), "tasks.0.judger")
    path, message = problem_of(caught)
    assert path == "tasks.0.judger"
    assert told in message


def test_each_unknown_option_is_told_at_its_own_path() -> None:
    """Every key the plugin does not take is a problem of its own, with the keys it does take."""  # P35
    with pytest.raises(ConfigError) as caught:
        construct(PluginSpec(f"{HERE}:Picky", {"need": 1, "other": 2, "more": 3}), "tasks.0.judger")
    problems = {problem.path: problem.message for problem in caught.value.problems}
    assert set(problems) == {"tasks.0.judger.other", "tasks.0.judger.more"}
    assert all("need, want" in message for message in problems.values())
    with pytest.raises(ConfigError) as caught:
        construct(PluginSpec(f"{HERE}:Plain", {"need": 1}), "p")
    assert problem_of(caught)[0] == "p.need"
