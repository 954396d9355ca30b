"""Reading a configuration: YAML, overrides, environment, the trainer's own file.

Invariants:

- Everything wrong is reported at once: one `ConfigError`, one `Problem` per fault, each with its dotted path.
- What is given is never changed: the mapping is copied before anything is filled in.
- Relative paths mean the folder of the configuration file, not the folder of the process.
- A problem never quotes a secret, and `dump_config` never shows one.
"""

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rollout_svc.config import Config, TrainerConfig
from rollout_svc.errors import ConfigError, Problem

__all__ = ["REFERENCE", "config_from_mapping", "dump_config", "load_config", "load_trainer", "problems_of"]

SECRET_KEY = re.compile(r"(^|_)(token|key|secret|password)$")
"""Names of keys whose values come from the environment and are never shown."""
REFERENCE = re.compile(r"\$\{([^}]*)\}")
"""`${NAME}`, the value of an environment variable."""
MASK = "***"
"""Stands for a secret in `dump_config`."""
PLAIN_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "unknown key",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
}
"""pydantic's messages that speak of Python, in words that speak of the file."""

M = TypeVar("M", bound=BaseModel)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: The YAML file.
        overrides: `a.b=c` each, later ones win; `c` is YAML, list items go by index (`workers.0.url=…`).

    Raises:
        ConfigError: With every problem found in the file, the overrides and the files it names.
    """
    path = Path(path)
    data = _read_mapping(path)
    problems = _apply_overrides(data, overrides)
    return _build(data, path.parent, problems)


def config_from_mapping(data: Mapping[str, Any], *, folder: Path | None = None) -> Config:
    """Make a configuration from decoded data.

    Args:
        data: The same keys as the file; it is copied.
        folder: What relative paths mean; the files named must then exist. Null: paths are left as they are.

    Raises:
        ConfigError: With every problem found.
    """
    return _build(copy.deepcopy(dict(data)), folder, [])


def load_trainer(path: str | Path) -> TrainerConfig:
    """Read a trainer's file alone: our keys at the top level, or in a `trainer:` section beside anything else.

    Raises:
        ConfigError: With every problem found, each naming the file.
    """
    path = Path(path)
    return _validate(TrainerConfig, _trainer_section(path), [], lambda problem: _in_file(problem, path))


def dump_config(config: Config) -> str:
    """Write the resolved configuration as YAML, secrets shown as `***`."""
    text: str = yaml.safe_dump(_mask(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
    return text


def problems_of(error: ValidationError, prefix: str = "") -> tuple[Problem, ...]:
    """Put a validation error as problems with dotted paths, below `prefix` if given."""
    return tuple(
        Problem(
            ".".join([prefix] * bool(prefix) + [str(step) for step in fault["loc"]]),
            _plain(fault["type"], fault["msg"]),
        )
        for fault in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _plain(kind: str, message: str) -> str:
    return PLAIN_MESSAGES.get(kind) or message.removeprefix("Value error, ")


def _build(data: dict[str, Any], folder: Path | None, problems: list[Problem]) -> Config:
    _expand_environment(data, problems)
    trainer_file = _include_trainer(data, folder, problems)
    if folder is not None:
        problems += _resolve_paths(data, folder)
    return _validate(Config, data, problems, trainer_file)


def _validate(model: type[M], data: object, problems: list[Problem], annotate: Callable[[Problem], Problem]) -> M:
    """Validate, and raise what is wrong together with what was found before."""
    try:
        made = model.model_validate(data)
    except ValidationError as error:
        found = [annotate(problem) for problem in problems_of(error)]
        raise ConfigError([*problems, *found]) from None
    if problems:
        raise ConfigError(problems)
    return made


# --- YAML ------------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """YAML without equal keys, anchors inside themselves, and errors of Python's for a 45th of the month."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            if event.anchor in self._open:
                message = f"anchor {event.anchor!r} is used inside itself"
                raise yaml.MarkedYAMLError(problem=message, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        node = super().compose_sequence_node(anchor)
        self._open.pop()
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        node = super().compose_mapping_node(anchor)
        self._open.pop()
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            kind = str(node.tag).rpartition(":")[2]
            message = f"{node.value!r} is no {kind}: {error}"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=node.start_mark) from None


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except RecursionError:
        raise yaml.YAMLError("is nested too deeply") from None


def _read_mapping(path: Path) -> dict[str, Any]:
    """Read one YAML file whose top level is a mapping; an empty file is an empty mapping."""
    try:
        data = _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError.at(str(path), f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError.at(str(path), f"is not UTF-8 text (byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError.at(where, _yaml_message(error)) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError.at(str(path), f"expected a mapping at the top level, not {_yaml_type(data)}")
    return data


def _yaml_message(error: yaml.YAMLError) -> str:
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    return " ".join(", ".join(part for part in parts if part).split()) or " ".join(str(error).split())


def _yaml_type(value: object) -> str:
    names: dict[type, str] = {list: "a list", dict: "a mapping", str: "a text", type(None): "nothing"}
    return names.get(type(value), f"{value!r}")


# --- overrides -------------------------------------------------------------------------------------------------------


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[Problem]:
    problems = []
    for override in overrides:
        dotted, equals, text = override.partition("=")
        steps = dotted.strip().split(".")
        if not equals or not all(steps):
            problems.append(Problem("--set", f"expected a.b=value, not {dotted!r}"))
            continue
        try:
            value = _parse_yaml(text)
        except yaml.YAMLError as error:
            problems.append(Problem(dotted, f"the value is not YAML: {_yaml_message(error)}"))
            continue
        message = _assign(data, steps, value)
        if message:
            problems.append(Problem(dotted, message))
    return problems


def _assign(data: dict[str, Any], steps: list[str], value: Any) -> str | None:
    """Set the value at the end of the steps, making what is missing on the way; or say why that cannot be."""
    place: Any = data
    for depth, step in enumerate(steps):
        key: Any = step
        if isinstance(place, list):
            if not step.isdecimal() or int(step) > len(place):
                return f"{step!r} is no place in a list of {len(place)} (an index up to {len(place)}, which appends)"
            key = int(step)
            if key == len(place):
                place.append(None)
        elif not isinstance(place, dict):
            return f"{'.'.join(steps[:depth])} is {_yaml_type(place)}, nothing can be set inside"
        if depth == len(steps) - 1:
            place[key] = value
            return None
        inside = place.get(key) if isinstance(place, dict) else place[key]
        if inside is None:
            inside = [] if steps[depth + 1].isdecimal() else {}
        place[key] = place = copy.copy(inside)  # what a YAML alias stands for is at other places too
    return None


# --- environment and secrets -----------------------------------------------------------------------------------------


def _expand_environment(data: dict[str, Any], problems: list[Problem]) -> None:
    """Replace `${NAME}` in keys, tokens and the `env` of engines, in place; `extra` is passed on as it is."""
    for path, owner, key in _walk(data, ()):
        value = owner[key]
        if not isinstance(value, str) or not (SECRET_KEY.search(str(key)) or _is_env(path)) or "extra" in path:
            continue
        names = REFERENCE.findall(value)
        unset = [name for name in names if name not in os.environ]
        problems += [Problem(".".join(path), f"environment variable {name!r} is not set") for name in unset]
        if names and not unset:
            owner[key] = REFERENCE.sub(lambda match: os.environ[match[1]], value)


def _is_env(path: tuple[str, ...]) -> bool:
    """Whether this is a variable of a launched engine (`workers.0.launch.env.NAME`): they often carry keys."""
    return path[-3:-1] == ("launch", "env")


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[Any, Any], Any]]:
    """Yield every key of every mapping inside: its path, the mapping, the key."""
    if isinstance(value, dict):
        for key in list(value):
            yield (*path, str(key)), value, key
            yield from _walk(value[key], (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, (*path, str(index)))


def _mask(data: dict[str, Any]) -> dict[str, Any]:
    for path, owner, key in _walk(data, ()):
        if owner[key] is not None and (SECRET_KEY.search(str(key)) or _is_env(path)):
            owner[key] = MASK
    return data


# --- files a configuration names -------------------------------------------------------------------------------------


def _include_trainer(
    data: dict[str, Any], folder: Path | None, problems: list[Problem]
) -> Callable[[Problem], Problem]:
    """Replace `trainer.file` by what the file says, keys beside `file` winning.

    Returns:
        What to do to a problem so that it names the file where the fault is the file's.
    """
    given = data.get("trainer")
    if not isinstance(given, dict) or "file" not in given:
        return lambda problem: problem
    given = dict(given)
    name = given.pop("file")
    data["trainer"] = given
    if not isinstance(name, str) or not name:
        problems.append(Problem("trainer.file", "expected the path of a file"))
        return lambda problem: problem
    path = _located(name, folder or Path())
    try:
        section = _trainer_section(path)
    except ConfigError as error:
        problems += [Problem("trainer.file", str(problem)) for problem in error.problems]
        return lambda problem: problem
    data["trainer"] = {**section, **given}
    theirs = {f"trainer.{key}" for key in section if key not in given}

    def annotate(problem: Problem) -> Problem:
        dotted = ".".join(problem.path.split(".")[:2])
        return _in_file(problem, path) if dotted in theirs else problem

    return annotate


def _trainer_section(path: Path) -> dict[str, Any]:
    data = _read_mapping(path)
    if "trainer" not in data:
        return data
    section = data["trainer"]
    if not isinstance(section, dict):
        raise ConfigError.at("trainer", f"expected a mapping, not {_yaml_type(section)} (in {path})")
    return section


def _in_file(problem: Problem, path: Path) -> Problem:
    return Problem(problem.path, f"{problem.message} (in {path})")


def _resolve_paths(data: dict[str, Any], folder: Path) -> list[Problem]:
    """Make the paths of files absolute, in place, and report those that are not there."""
    problems = []
    tasks = data.get("tasks")
    for index, task in enumerate(tasks if isinstance(tasks, list) else ()):
        prompts = task.get("prompts") if isinstance(task, dict) else None
        if isinstance(prompts, dict) and isinstance(prompts.get("jsonl"), str) and prompts["jsonl"]:
            path = _located(prompts["jsonl"], folder)
            prompts["jsonl"] = str(path)
            if not path.is_file():
                problems.append(Problem(f"tasks.{index}.prompts.jsonl", f"no such file: {path}"))
    workers = data.get("workers")
    for worker in workers if isinstance(workers, list) else ():
        launch = worker.get("launch") if isinstance(worker, dict) else None
        if isinstance(launch, dict) and isinstance(launch.get("log_dir"), str) and launch["log_dir"]:
            launch["log_dir"] = str(_located(launch["log_dir"], folder))
    for part in ("buffer", "trajectories"):
        section = data.get(part)
        if isinstance(section, dict) and isinstance(section.get("path"), str) and section["path"]:
            section["path"] = str(_located(section["path"], folder))
    tokenizer = data.get("tokenizer")
    if isinstance(tokenizer, dict):
        problems += _resolve_tokenizer(tokenizer, folder)
    return problems


def _resolve_tokenizer(tokenizer: dict[str, Any], folder: Path) -> list[Problem]:
    problems = []
    name, template = tokenizer.get("path"), tokenizer.get("chat_template")
    if isinstance(name, str) and name not in {"", "bytes"}:
        path = _located(name, folder)
        tokenizer["path"] = str(path)
        if not (path / "tokenizer.json").is_file():
            problems.append(Problem("tokenizer.path", f"no tokenizer.json in {path}"))
    if isinstance(template, str) and template and "{" not in template:
        path = _located(template, folder)
        tokenizer["chat_template"] = str(path)
        if not path.is_file():
            problems.append(Problem("tokenizer.chat_template", f"neither a template nor a file: {path}"))
    return problems


def _located(name: str, folder: Path) -> Path:
    return Path(os.path.abspath(folder / Path(name).expanduser()))  # noqa: PTH100 - without following links
