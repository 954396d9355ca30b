"""Settings: bounds, refusals, and what each refusal says."""

import sys
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from rollout_svc import config as settings
from rollout_svc.config import AgentConfig, Config, JudgerConfig, SamplingConfig, is_loopback
from rollout_svc.configfile import config_from_mapping
from rollout_svc.errors import ConfigError

TASK = {"name": "a", "prompts": {"push": True}}


def paths(**parts: Any) -> dict[str, str]:
    """Give the problems of a configuration with these parts, by path."""
    with pytest.raises(ConfigError) as raised:
        config_from_mapping({"tasks": [TASK], **parts})
    return {problem.path: problem.message for problem in raised.value.problems}


def test_defaults_are_the_documented_ones() -> None:
    """A configuration of one task has the documented default for everything else."""
    config = Config.model_validate({"tasks": [TASK]})
    assert config.model_dump() == {
        "service": {"host": "127.0.0.1", "port": 8700, "token": None, "public_url": None},
        "tokenizer": {"path": None, "chat_template": None},
        "workers": (),
        "cluster": None,
        "routing": "least_tokens",
        "start_timeout_s": 600,
        "request_timeout_s": 1200,
        "tasks": (
            {
                "name": "a",
                "prompts": {"jsonl": None, "source": None, "push": True},
                "agent": {"name": "single_turn", "path": None, "on_pause": None},
                "judger": {
                    "name": "exact",
                    "path": None,
                    "timeout_s": 60,
                    "concurrency": None,
                    "requests_per_minute": None,
                    "on_failure": "fail",
                    "redos": 3,
                    "partial": None,
                },
                "sampling": {
                    "max_tokens": 256,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": None,
                    "stop": (),
                    "seed": None,
                    "return_routed_experts": True,
                    "extra": {},
                },
                "weight": 1.0,
                "partial_rollout": None,
                "filter": None,
                "max_groups": None,
            },
        ),
        "trainer": {
            "train_batch_size": 64,
            "prompt_repeat_k": 8,
            "over_sample_threshold": 0.2,
            "max_batch_per_worker": 64,
            "allow_over_concurrency_ratio": 1.2,
            "max_staleness": 1,
            "max_token_staleness": None,
            "update_interval": 1,
            "initial_version": 0,
        },
        "producer": {
            "strategy": "async",
            "shards": 1,
            "max_attempts": 3,
            "no_worker_timeout_s": None,
            "tail_batch_size": None,
            "tail_after_aborts": 2,
        },
        "judges": {"processes": 2},
        "pause": {"mode": "abort", "deadline_s": 30, "abort_interval_s": 5, "quarantine_s": 60},
        "weights": {"on_failure": "stop", "update_timeout_s": None, "check_files": True},
        "buffer": {"path": None, "lease_s": 3600, "max_bytes": None},
        "journal": {"partial_interval_s": 1.0, "synchronous": "normal", "keep_steps": 64},
        "sessions": {"hold_s": 60, "ttl_s": 600, "max": 1024, "tool_format": "hermes"},
        "evaluation": {"max_in_flight": 64},
        "experts": {
            "enabled": False,
            "num_experts": None,
            "top_k": None,
            "layers": None,
            "moe_layers": None,
            "max_bytes": 1073741824,
            "store": "memory",
            "ray_address": "auto",
        },
        "memory": {"debug": False, "window_steps": 20, "growth": 0.01},
        "trajectories": {"path": None, "max_file_bytes": 268435456, "max_files": None},
    }


def test_prompts_of_a_file_have_an_order() -> None:
    """A file is read in shuffled passes without end unless it says otherwise."""
    prompts = Config.model_validate({"tasks": [{"name": "a", "prompts": {"jsonl": "p"}}]}).tasks[0].prompts
    assert (prompts.shuffle, prompts.seed, prompts.epochs) == (True, 0, None)


@pytest.mark.parametrize("prompts", [{"push": True}, {"source": "m:a"}, {"jsonl": "p", "seed": 3}])
def test_what_is_written_can_be_read_again(prompts: dict[str, Any]) -> None:
    """The record of a configuration, as JSON, is a configuration, the same one."""
    config = config_from_mapping({"tasks": [{"name": "a", "prompts": prompts}]})
    assert config_from_mapping(config.model_dump(mode="json")) == config


def test_a_worker_has_the_documented_keys() -> None:
    """A worker needs only its address; what its engine runs at once is the trainer's setting unless it says."""
    config = Config.model_validate({"tasks": [TASK], "workers": [{"url": "http://127.0.0.1:30000/"}]})
    assert config.workers[0].model_dump() == {
        "url": "http://127.0.0.1:30000",
        "launch": None,
        "engines": None,
        "dialect": "auto",
        "api_key": None,
        "admin_key": None,
        "max_batch": None,
        "exclusive": True,
        "stream": False,
    }


def test_a_launched_worker_has_the_documented_keys() -> None:
    """A launched worker needs only its command; places in it are filled in, and other braces are left alone."""
    command = ["{python}", "--json", '{"a": {}}', "--at={host}:{port}"]
    worker = Config.model_validate({"tasks": [TASK], "workers": [{"launch": {"command": command}}]}).workers[0]
    assert worker.launch is not None
    assert worker.launch.model_dump() == {
        "command": tuple(command),
        "host": "127.0.0.1",
        "port": "auto",
        "env": {},
        "log_dir": None,
        "restarts": 5,
        "restart_window_s": 3600,
        "resources": None,
        "placement": None,
    }
    assert worker.launch.command_at(7) == (sys.executable, "--json", '{"a": {}}', "--at=127.0.0.1:7")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::1", "http://[::1]:7"),
        ("0.0.0.0", "http://127.0.0.1:7"),
        ("::", "http://[::1]:7"),
        ("gpu-0", "http://gpu-0:7"),
    ],
)
def test_an_engine_is_reached_where_it_listens(host: str, url: str) -> None:
    """One that listens everywhere is reached at this machine."""
    launch = settings.LaunchConfig(command=("e", "{port}"), host=host)
    assert launch.url_at(7) == url


@pytest.mark.parametrize(
    ("part", "value", "path"),
    [
        ("service", {"port": 65536}, "service.port"),
        ("service", {"port": "8700"}, "service.port"),
        ("service", {"host": ""}, "service.host"),
        ("service", {"token": "with blank"}, "service.token"),
        ("service", {"token": ""}, "service.token"),
        ("service", 7, "service"),
        ("tokenizer", {"path": 3}, "tokenizer.path"),
        ("start_timeout_s", 0, "start_timeout_s"),
        ("request_timeout_s", float("inf"), "request_timeout_s"),
        ("request_timeout_s", float("nan"), "request_timeout_s"),
        ("workers", [{}], "workers.0"),
        ("workers", [{"url": "http://h", "launch": {"command": ["e", "{port}"]}}], "workers.0"),
        ("workers", [{"launch": {}}], "workers.0.launch.command"),
        ("workers", [{"launch": {"command": []}}], "workers.0.launch.command"),
        ("workers", [{"launch": {"command": "e --port {port}"}}], "workers.0.launch.command"),
        ("workers", [{"launch": {"command": ["e", "--port", 1]}}], "workers.0.launch.command.2"),
        ("workers", [{"launch": {"command": ["e"]}}], "workers.0.launch.command"),
        ("workers", [{"launch": {"command": ["e"], "port": 0}}], "workers.0.launch.port"),
        ("workers", [{"launch": {"command": ["e"], "port": "80"}}], "workers.0.launch.port"),
        ("workers", [{"launch": {"command": ["e"], "port": True}}], "workers.0.launch.port"),
        ("workers", [{"launch": {"command": ["e"], "port": 1, "host": "a b"}}], "workers.0.launch.host"),
        ("workers", [{"launch": {"command": ["e"], "port": 1, "env": ["A=1"]}}], "workers.0.launch.env"),
        ("workers", [{"launch": {"command": ["e"], "port": 1, "env": {"A": 1}}}], "workers.0.launch.env.A"),
        ("workers", [{"launch": {"command": ["e"], "port": 1, "restarts": -1}}], "workers.0.launch.restarts"),
        ("workers", [{"launch": {"command": ["e"], "port": 1, "cwd": "/"}}], "workers.0.launch.cwd"),
        ("workers", [{"launch": {"command": ["e"], "port": 9}}] * 2, "workers.1.launch.port"),
        (
            "workers",
            [{"launch": {"command": ["e"], "port": 9}}, {"url": "http://127.0.0.1:9"}],
            "workers.0.launch.port",
        ),
        ("workers", [{"url": "ftp://host"}], "workers.0.url"),
        ("workers", [{"url": "http://"}], "workers.0.url"),
        ("workers", [{"url": "127.0.0.1:30000"}], "workers.0.url"),
        ("workers", [{"url": "http://host:99999"}], "workers.0.url"),
        ("workers", [{"url": "http://user:word@host"}], "workers.0.url"),
        ("workers", [{"url": "http://host", "max_batch": 0}], "workers.0.max_batch"),
        ("workers", {"url": "http://host"}, "workers"),
        ("trainer", {"train_batch_size": 0}, "trainer.train_batch_size"),
        ("trainer", {"train_batch_size": True}, "trainer.train_batch_size"),
        ("trainer", {"prompt_repeat_k": 2.5}, "trainer.prompt_repeat_k"),
        ("trainer", {"over_sample_threshold": -0.1}, "trainer.over_sample_threshold"),
        ("trainer", {"allow_over_concurrency_ratio": 0}, "trainer.allow_over_concurrency_ratio"),
        ("trainer", {"max_staleness": -1}, "trainer.max_staleness"),
        ("trainer", {"update_interval": 0}, "trainer.update_interval"),
        ("producer", {"max_attempts": 0}, "producer.max_attempts"),
        ("pause", {"deadline_s": 0}, "pause.deadline_s"),
        ("pause", {"mode": "stop"}, "pause.mode"),
        ("buffer", {"lease_s": -1}, "buffer.lease_s"),
        ("no_such_part", {}, "no_such_part"),
    ],
)
def test_a_value_out_of_bounds_is_refused_at_its_path(part: str, value: Any, path: str) -> None:
    """P35: a wrong type, an unknown key or a value out of bounds is one problem, at the dotted path of the field."""
    assert list(paths(**{part: value})) == [path]


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ({"name": "two words"}, "tasks.0.name"),
        ({"weight": 0}, "tasks.0.weight"),
        ({"agent": {"name": "x", "path": "m:a"}}, "tasks.0.agent"),
        ({"agent": {}}, "tasks.0.agent"),
        ({"agent": {"path": "no colon"}}, "tasks.0.agent.path"),
        ({"agent": {"name": "x", "on_pause": "wait"}}, "tasks.0.agent.on_pause"),
        ({"judger": {"name": "x", "timeout_s": 0}}, "tasks.0.judger.timeout_s"),
        ({"judger": {"name": "x", "concurrency": 0}}, "tasks.0.judger.concurrency"),
        ({"prompts": {}}, "tasks.0.prompts"),
        ({"prompts": {"push": False}}, "tasks.0.prompts"),
        ({"prompts": {"push": True, "jsonl": "x"}}, "tasks.0.prompts"),
        ({"prompts": {"source": "module"}}, "tasks.0.prompts.source"),
        ({"prompts": {"push": True, "epochs": 0}}, "tasks.0.prompts.epochs"),
        ({"prompts": {"push": True, "epochs": 1}}, "tasks.0.prompts.epochs"),
        ({"prompts": {"source": "m:a", "shuffle": True}}, "tasks.0.prompts.shuffle"),
        ({"prompts": {"source": "m:a", "seed": 0}}, "tasks.0.prompts.seed"),
        ({"sampling": {"max_tokens": 0}}, "tasks.0.sampling.max_tokens"),
        ({"sampling": {"temperature": -1}}, "tasks.0.sampling.temperature"),
        ({"sampling": {"top_p": 1.1}}, "tasks.0.sampling.top_p"),
        ({"sampling": {"top_k": 0}}, "tasks.0.sampling.top_k"),
        ({"sampling": {"stop": [""]}}, "tasks.0.sampling.stop.0"),
        ({"sampling": {"stop": "end"}}, "tasks.0.sampling.stop"),
        ({"sampling": {"extra": 1}}, "tasks.0.sampling.extra"),
        ({"sampling": {"max_token": 1}}, "tasks.0.sampling.max_token"),
    ],
)
def test_a_task_is_refused_at_its_path(task: dict[str, Any], path: str) -> None:
    """P35: what is wrong inside a task carries the task's index in its path."""
    assert list(paths(tasks=[{**TASK, **task}])) == [path]


def test_beyond_loopback_only_with_a_token() -> None:
    """P34: an address that other machines reach is refused without a token, at `service.host`."""
    assert "service.token" in paths(service={"host": "0.0.0.0"})["service.host"]
    assert "service.host" in paths(service={"host": "rollouts.example"})
    assert "service.host" in paths(service={"host": "::"})
    guarded = config_from_mapping({"tasks": [TASK], "service": {"host": "0.0.0.0", "token": "t"}})
    assert guarded.service.token == "t"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.7", True), ("::1", True), ("10.0.0.1", False), ("example.org", False)],
)
def test_loopback_is_known(host: str, loopback: bool) -> None:
    """P34: loopback is `localhost` and the loopback networks, nothing that merely might be."""
    assert is_loopback(host) is loopback


def test_names_and_addresses_are_unique() -> None:
    """P35: two tasks of one name or two workers at one address are refused at the second."""
    problems = paths(tasks=[TASK, TASK], workers=[{"url": "http://host:1"}, {"url": "http://host:1/"}])
    assert list(problems) == ["workers.1.url", "tasks.1.name"]
    assert "already the url of worker 0" in problems["workers.1.url"]


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"url": "http://localhost:9"}, {"url": "http://127.0.0.1:9"}, "workers.1.url"),
        ({"url": "http://Host"}, {"url": "http://host:80/"}, "workers.1.url"),
        ({"url": "http://localhost:9"}, {"launch": {"command": ["e"], "port": 9}}, "workers.1.launch.port"),
        ({"launch": {"command": ["e"], "port": 9, "host": "localhost"}}, {"url": "http://[::1]:9"}, None),
    ],
)
def test_one_engine_under_two_names_is_refused(first: Any, second: Any, path: str | None) -> None:
    """P35: two workers on one engine would abort each other's requests, whatever they call it."""
    assert list(paths(workers=[first, second])) == [path or "workers.0.launch.port"]


def test_a_service_has_work() -> None:
    """P35: a configuration without a task is refused; one without workers is not: they may come later."""
    assert "tasks" in paths(tasks=[])
    assert config_from_mapping({"tasks": [TASK], "workers": []}).workers == ()


def test_everything_wrong_is_said_at_once() -> None:
    """P35: one reading reports every problem, also rules between fields of different parts."""
    problems = paths(
        service={"host": "0.0.0.0"},
        pause={"deadline_s": -1},
        buffer={"lease_s": -1},
        workers=[{"url": "http://h"}, {"url": "http://h"}],
        tasks=[{**TASK, "agent": {}}, {**TASK, "name": "b", "weight": "heavy"}],
    )
    assert set(problems) == {
        "service.host",
        "pause.deadline_s",
        "buffer.lease_s",
        "workers.1.url",
        "tasks.0.agent",
        "tasks.1.weight",
    }


def test_a_plugin_gets_its_own_keys() -> None:
    """P35: further keys of an agent or judger are its options, and changing them changes nobody else's."""
    judger = JudgerConfig.model_validate({"name": "regex", "pattern": "x", "nested": {"a": [1]}, "timeout_s": 5})
    assert judger.options == {"pattern": "x", "nested": {"a": [1]}}
    judger.options["nested"]["a"].append(2)
    assert judger.options["nested"] == {"a": [1]}
    assert AgentConfig(name="single_turn").options == {}


def test_settings_do_not_change() -> None:
    """P35: a setting is a value: assigning to one is an error."""
    with pytest.raises(ValidationError):
        SamplingConfig().max_tokens = 3  # type: ignore[misc]


def test_secrets_stay_out_of_repr() -> None:
    """P34: a logged configuration shows no token and no key."""
    config = Config.model_validate(
        {
            "tasks": [TASK],
            "service": {"token": "hush-1"},
            "workers": [{"url": "http://h", "api_key": "hush-2", "admin_key": "hush-3"}],
        }
    )
    assert "hush" not in repr(config)


def test_a_problem_never_quotes_a_secret() -> None:
    """P34: a bad key is refused without being shown."""
    problems = paths(service={"token": "hush hush"}, workers=[{"url": "http://me:hush@h"}, {"url": "x://me:hush@h"}])
    assert set(problems) == {"service.token", "workers.0.url", "workers.1.url"}
    assert not any("hush" in message for message in problems.values())


def test_every_field_says_what_it_is() -> None:
    """Every setting has a docstring: it is the description in the schema."""
    models = [item for item in vars(settings).values() if isinstance(item, type) and issubclass(item, BaseModel)]
    unsaid = [f"{m.__name__}.{name}" for m in models for name, field in m.model_fields.items() if not field.description]
    assert unsaid == []
