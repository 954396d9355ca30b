"""Reading a configuration: files, overrides, environment, and all problems at once."""

from pathlib import Path

import pytest
import yaml

from rollout_svc.config import TrainerConfig
from rollout_svc.configfile import config_from_mapping, dump_config, load_config, load_trainer
from rollout_svc.errors import ConfigError, Problem
from rollout_svc.plan import make_plan

CONFIGS = Path(__file__).parent.parent / "configs"
MINIMAL = "tasks: [{name: a, prompts: {push: true}}]\n"


def write(folder: Path, text: str, name: str = "service.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> dict[str, str]:
    """Give what is wrong with a file, by path."""
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    return {problem.path: problem.message for problem in raised.value.problems}


def test_a_file_is_read(tmp_path: Path) -> None:
    """A file of one task is a configuration."""
    assert load_config(write(tmp_path, MINIMAL)).tasks[0].name == "a"


def test_an_error_is_one_line_per_problem() -> None:
    """P35: `str` of the error is one readable line per problem, path first."""
    error = ConfigError([Problem("a.b", "is wrong"), Problem("c", "too")])
    assert str(error) == "a.b: is wrong\nc: too"
    assert error.problems == (Problem("a.b", "is wrong"), Problem("c", "too"))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("tasks: [\n  {name: a\n", ":3:1"),
        ("a: b: c\n", ":1:5"),
        ("pause:\n\tmode: abort\n", ":2:1"),
        ("pause: {}\npause: {}\n", ":2:1"),
        ("pause:\n  deadline_s: 1\n  deadline_s: 2\n", ":3:3"),
        ("pause:\n  deadline_s: 2024-13-45\n", ":2:15"),
        ("pause:\n  deadline_s: !!float soon\n", ":2:15"),
        ("pause:\n  deadline_s: !!bool 3\n", ":2:15"),
        ("tasks: &again\n- *again\n", ":2:3"),
        ("pause: &again {mode: {deadline_s: *again}}\n", ":1:35"),
        ("[" * 5000, ""),
    ],
)
def test_bad_yaml_is_placed(tmp_path: Path, text: str, where: str) -> None:
    """P35: what cannot be read, or given twice, or inside itself, is one line with file, and line and column if any."""
    path = write(tmp_path, text)
    found = problems(path)
    assert list(found) == [f"{path}{where}"]
    assert "\n" not in next(iter(found.values()))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text\n", "3\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    """P35: valid YAML that is no mapping is refused by the file's name."""
    path = write(tmp_path, text)
    assert "expected a mapping" in problems(path)[str(path)]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """P35: a missing file, a folder, and bytes that are no text are each one line with the file's name."""
    assert "No such file" in problems(tmp_path / "none.yaml")[str(tmp_path / "none.yaml")]
    assert str(tmp_path) in problems(tmp_path)
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems(path)[str(path)]
    path.write_bytes(b"a: \x07\n")
    assert len(problems(path)) == 1


def test_an_empty_file_lacks_its_tasks(tmp_path: Path) -> None:
    """P35: an empty file is a configuration without tasks, and says so."""
    assert problems(write(tmp_path, "")) == {"tasks": "is required"}


def test_overrides_win(tmp_path: Path) -> None:
    """`--set` changes what the file says: values are YAML, list items go by index, what is missing is made."""
    path = write(tmp_path, MINIMAL + "workers: [{url: 'http://a:1'}]\ntokenizer:\n")
    config = load_config(
        path,
        [
            "workers.0.url=http://b:2",
            "workers.1.url=http://c:3",
            "workers.1.max_batch=8",
            "pause.deadline_s=2.5",
            "tokenizer.path=bytes",
            "tasks.0.sampling.stop=[x, 'y=z']",
            "tasks.0.judger.name=regex",
            "tasks.0.judger.pattern=a=b",
            "service.token=",
        ],
    )
    assert [worker.url for worker in config.workers] == ["http://b:2", "http://c:3"]
    assert config.workers[1].max_batch == 8
    assert config.pause.deadline_s == 2.5
    assert config.tokenizer.path == "bytes"
    assert config.tasks[0].sampling.stop == ("x", "y=z")
    assert config.tasks[0].judger.options == {"pattern": "a=b"}
    assert config.service.token is None


def test_an_override_is_of_one_place(tmp_path: Path) -> None:
    """`--set` changes the worker it names, not the others that were written with its YAML anchor."""
    engine = "{command: [e, '{port}'], env: {A: a}}"
    path = write(tmp_path, MINIMAL + f"workers: [{{launch: &e {engine}}}, {{launch: *e}}]\n")
    overrides = ["workers.0.launch.port=9", "workers.1.launch.env.A=b", "workers.1.launch.command.0=f"]
    first, second = (worker.launch for worker in load_config(path, overrides).workers)
    assert first is not None
    assert second is not None
    assert (first.port, second.port) == (9, "auto")
    assert (first.env, second.env) == ({"A": "a"}, {"A": "b"})
    assert (first.command[0], second.command[0]) == ("e", "f")


def test_overrides_can_make_a_list(tmp_path: Path) -> None:
    """`--set workers.0.url=…` makes the first worker of a file that has none."""
    config = load_config(write(tmp_path, MINIMAL), ["workers.0.url=http://a:1"])
    assert config.workers[0].url == "http://a:1"


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("nothing", "--set"),
        ("=3", "--set"),
        ("a..b=3", "--set"),
        ("pause.deadline_s=[1", "pause.deadline_s"),
        ("pause.deadline_s=soon", "pause.deadline_s"),
        ("pause.deadline=3", "pause.deadline"),
        ("tasks.a.weight=2", "tasks.a.weight"),
        ("tasks.2.weight=2", "tasks.2.weight"),
        ("start_timeout_s.x=2", "start_timeout_s.x"),
    ],
)
def test_a_bad_override_is_refused_at_its_path(tmp_path: Path, override: str, path: str) -> None:
    """P35: an override that cannot be applied, or makes a bad value, is one problem at its path."""
    assert list(problems(write(tmp_path, MINIMAL + "start_timeout_s: 5\n"), override)) == [path]


def test_the_environment_fills_keys_and_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`${NAME}` is expanded in any key or token, a plugin's too, and nowhere else."""
    monkeypatch.setenv("SECRET", "s3cret")
    path = write(
        tmp_path,
        """
service: {token: "${SECRET}"}
workers: [{url: "http://h", api_key: "a-${SECRET}-b", admin_key: "${SECRET}${SECRET}"}]
tasks:
  - name: a
    prompts: {push: true}
    judger: {name: remote, api_key: "${SECRET}", prompt: "${SECRET}"}
    sampling: {extra: {token: "${SECRET}"}}
""",
    )
    config = load_config(path)
    assert config.service.token == "s3cret"
    assert config.workers[0].api_key == "a-s3cret-b"
    assert config.workers[0].admin_key == "s3crets3cret"
    assert config.tasks[0].judger.options == {"api_key": "s3cret", "prompt": "${SECRET}"}
    assert config.tasks[0].sampling.extra == {"token": "${SECRET}"}


def test_an_unset_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: a variable that is not set is a problem at the field that wants it, never an empty key."""
    monkeypatch.delenv("NOT_THERE", raising=False)
    found = problems(write(tmp_path, MINIMAL + 'service: {token: "${NOT_THERE}", host: 0.0.0.0}\n'))
    assert found == {"service.token": "environment variable 'NOT_THERE' is not set"}


def test_an_empty_variable_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: a token that is empty in the environment is refused, it does not mean no token."""
    monkeypatch.setenv("EMPTY", "")
    assert list(problems(write(tmp_path, MINIMAL + 'service: {token: "${EMPTY}"}\n'))) == ["service.token"]


def test_a_prompt_file_is_found_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative prompt path means the configuration's folder, wherever the process runs."""
    write(tmp_path, "{}\n", "deep/data/p.jsonl")
    path = write(tmp_path, "tasks: [{name: a, prompts: {jsonl: data/p.jsonl}}]\n", "deep/service.yaml")
    monkeypatch.chdir(tmp_path)
    config = load_config(path.relative_to(tmp_path))
    assert config.tasks[0].prompts.jsonl == str(tmp_path / "deep/data/p.jsonl")


def test_missing_files_are_problems_at_their_fields(tmp_path: Path) -> None:
    """P35: prompt file, tokenizer, template and trainer file that are not there are all reported, with the rest."""
    path = write(
        tmp_path,
        """
tasks: [{name: a, prompts: {jsonl: none.jsonl}, weight: -1}]
tokenizer: {path: no-model, chat_template: none.jinja}
trainer: {file: none.yaml}
""",
    )
    found = problems(path)
    assert set(found) == {
        "tasks.0.prompts.jsonl",
        "tasks.0.weight",
        "tokenizer.path",
        "tokenizer.chat_template",
        "trainer.file",
    }
    assert str(tmp_path / "none.jsonl") in found["tasks.0.prompts.jsonl"]


def test_the_trainer_may_have_its_own_file(tmp_path: Path) -> None:
    """`trainer.file` brings the trainer's keys, from its top level or its `trainer` section; keys beside it win."""
    write(tmp_path, "train_batch_size: 128\nprompt_repeat_k: 4\n", "flat.yaml")
    write(tmp_path, "optimizer: {lr: 1}\ntrainer: {train_batch_size: 32}\n", "nested.yaml")
    flat = load_config(write(tmp_path, MINIMAL + "trainer: {file: flat.yaml, prompt_repeat_k: 2}\n"))
    assert (flat.trainer.train_batch_size, flat.trainer.prompt_repeat_k) == (128, 2)
    nested = load_config(write(tmp_path, MINIMAL + "trainer: {file: nested.yaml}\n"), ["trainer.max_staleness=3"])
    assert (nested.trainer.train_batch_size, nested.trainer.max_staleness) == (32, 3)
    assert load_trainer(tmp_path / "nested.yaml") == TrainerConfig(train_batch_size=32)


def test_a_fault_in_the_trainer_file_names_that_file(tmp_path: Path) -> None:
    """P35: what is wrong in the trainer's file says so; what is wrong beside it does not."""
    trainer = write(tmp_path, "train_batch_size: many\nlearning_rate: 1\n", "trainer.yaml")
    found = problems(write(tmp_path, MINIMAL + "trainer: {file: trainer.yaml, prompt_repeat_k: 0}\n"))
    assert set(found) == {"trainer.train_batch_size", "trainer.learning_rate", "trainer.prompt_repeat_k"}
    assert str(trainer) in found["trainer.train_batch_size"]
    assert str(trainer) in found["trainer.learning_rate"]
    assert str(trainer) not in found["trainer.prompt_repeat_k"]


def test_a_trainer_file_alone_is_strict(tmp_path: Path) -> None:
    """P35: the trainer's file read alone refuses unknown keys, a section that is none, and bad YAML, by its name."""
    for text in ["learning_rate: 1\n", "trainer: 3\n", "trainer: [\n", "trainer: {x: 1}\n"]:
        path = write(tmp_path, text, "trainer.yaml")
        with pytest.raises(ConfigError, match=r"trainer\.yaml"):
            load_trainer(path)
    with pytest.raises(ConfigError, match=r"trainer\.file: .*trainer\.yaml"):
        load_config(write(tmp_path, MINIMAL + "trainer: {file: trainer.yaml}\n"), ["trainer.file=gone/trainer.yaml"])
    assert list(problems(write(tmp_path, MINIMAL + "trainer: {file: 3}\n"))) == ["trainer.file"]


def test_given_data_is_not_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a caller passes in is copied: no expansion shows in it."""
    monkeypatch.setenv("SECRET", "s")
    write(tmp_path, "{}\n", "p.jsonl")
    data = {"tasks": [{"name": "a", "prompts": {"jsonl": "p.jsonl"}}], "service": {"token": "${SECRET}"}}
    config = config_from_mapping(data, folder=tmp_path)
    assert config.service.token == "s"
    assert data == {"tasks": [{"name": "a", "prompts": {"jsonl": "p.jsonl"}}], "service": {"token": "${SECRET}"}}


def test_data_that_is_no_configuration_is_refused() -> None:
    """P35: parts of a wrong shape are problems, not crashes."""
    for data in [{"tasks": 3}, {"tasks": [3]}, {"tasks": [{"prompts": 3}]}, {1: 2}, {"trainer": [1]}, {"tokenizer": 1}]:
        with pytest.raises(ConfigError):
            config_from_mapping(data, folder=Path())  # type: ignore[arg-type]


def test_a_dump_hides_secrets_and_reads_back() -> None:
    """P34: the resolved configuration is YAML with every key and token shown as `***`, options included."""
    config = config_from_mapping(
        {
            "service": {"token": "hush"},
            "workers": [{"url": "http://h", "api_key": "hush", "max_batch": 3}],
            "tasks": [{"name": "a", "prompts": {"push": True}, "judger": {"name": "x", "api_key": "hush", "k": 1}}],
        }
    )
    text = dump_config(config)
    assert "hush" not in text
    data = yaml.safe_load(text)
    assert data["service"]["token"] == "***"
    assert data["workers"][0] | {"api_key": "***", "admin_key": None, "max_batch": 3} == data["workers"][0]
    assert data["tasks"][0]["judger"]["k"] == 1
    assert data["tasks"][0]["sampling"]["max_tokens"] == 256
    assert dump_config(config_from_mapping(data)) == text
    assert config.service.token == "hush"


@pytest.mark.parametrize("name", ["quickstart.yaml", "sglang.yaml", "vllm.yaml", "async.yaml", "trainer-example.yaml"])
def test_the_examples_are_valid(name: str) -> None:
    """P35: every example configuration loads as it is."""
    assert load_config(CONFIGS / name).tasks


def test_the_trainer_example_is_complete() -> None:
    """The trainer example names every key of the trainer, and reads alone."""
    data = yaml.safe_load((CONFIGS / "trainer-example.yaml").read_text())
    assert set(data["trainer"]) == set(TrainerConfig.model_fields)
    assert load_trainer(CONFIGS / "trainer-example.yaml").train_batch_size == 64
    assert load_config(CONFIGS / "sglang.yaml").trainer.train_batch_size == 64


@pytest.mark.parametrize("name", ["quickstart.yaml", "sglang.yaml", "vllm.yaml"])
def test_the_examples_fit_their_workers(name: str) -> None:
    """The example deployments need no adjusting: their plans have no warnings."""
    config = load_config(CONFIGS / name)
    assert make_plan(config.trainer, [worker.max_batch for worker in config.workers]).warnings == ()


def test_the_environment_of_an_engine_is_expanded_and_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P34: `${NAME}` in `launch.env` is the service's variable, an unset one a problem; a dump shows no value of it."""
    monkeypatch.setenv("HUB", "hush")
    launch = "{command: [e, '{port}', '${HUB}'], log_dir: logs, env: {HF_TOKEN: '${HUB}', HF_HOME: '/x/${HUB}'}}"
    config = load_config(write(tmp_path, MINIMAL + f"workers: [{{launch: {launch}}}]\n"))
    found = config.workers[0].launch
    assert found is not None
    assert found.env == {"HF_TOKEN": "hush", "HF_HOME": "/x/hush"}
    assert found.command == ("e", "{port}", "${HUB}")
    assert found.log_dir == str(tmp_path / "logs")
    assert "hush" not in dump_config(config)
    assert "hush" not in repr(config)
    assert problems(
        write(tmp_path, MINIMAL + "workers: [{launch: {command: [e], port: 1, env: {A: '${NO_SUCH}'}}}]")
    ) == {"workers.0.launch.env.A": "environment variable 'NO_SUCH' is not set"}
