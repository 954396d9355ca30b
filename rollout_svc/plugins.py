"""Finding agents, judgers, filters and prompt sources that are not ours: by entry point, or by `module:attr`.

Invariants:

- The package never imports a plugin by name; what is installed is asked for by its entry point.
- Everything that can go wrong here is a ConfigError at the dotted path the user wrote.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Final, Literal

from rollout_svc.config import PluginConfig
from rollout_svc.errors import ConfigError, Problem

__all__ = ["Kind", "PluginSpec", "check_options", "construct", "load_attr", "resolve"]

Kind = Literal["agents", "judgers", "filters"]
_GROUP: Final = "rollout_svc."


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """Where a plugin lives and what it is made with; picklable, so that another process can make its own."""

    target: str
    options: dict[str, Any]


def resolve(config: PluginConfig, kind: Kind, path: str) -> PluginSpec:
    """Turn `name` or `path` of a task into an importable target.

    Raises:
        ConfigError: at `path.name` when no such entry point is installed.
    """
    if config.path is not None:
        return PluginSpec(config.path, config.options)
    installed = {entry.name: entry.value for entry in entry_points(group=_GROUP + kind)}
    name = str(config.name)
    if name not in installed:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError.at(f"{path}.name", f"no {kind[:-1]} named {name!r} is installed; there are: {known}")
    return PluginSpec(installed[name], config.options)


def load_attr(target: str) -> Any:
    """Import `module:attr`; raises ImportError or AttributeError as Python does."""
    module, _, attr = target.partition(":")
    found: Any = importlib.import_module(module)
    for part in attr.split("."):
        found = getattr(found, part)
    return found


def construct(spec: PluginSpec, path: str) -> Any:
    """Make the plugin: a class is called with its options, anything else is used as it is.

    Raises:
        ConfigError: it cannot be imported, or refuses its options.
    """
    try:
        found = load_attr(spec.target)
    except (Exception, SystemExit) as error:  # a script that exits when it is imported
        raise ConfigError.at(path, f"cannot import {spec.target!r}: {type(error).__name__}: {error}") from error
    if not inspect.isclass(found):
        if spec.options:
            keys = ", ".join(sorted(spec.options))
            raise ConfigError.at(path, f"{spec.target!r} is not a class and takes no options ({keys})")
        return found
    check_options(found, spec, path)
    try:
        return found(**spec.options)
    except ConfigError as error:  # one that knows which of its options it is
        raise ConfigError(
            Problem(f"{path}.{at.path}" if at.path else path, at.message) for at in error.problems
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError.at(path, f"{spec.target!r} refused its options: {type(error).__name__}: {error}") from error


def check_options(found: Any, spec: PluginSpec, path: str) -> None:
    """Compare the options with what the class takes, and name each that it does not."""
    try:
        signature = inspect.signature(found)
    except ValueError as error:  # a class that does not tell its parameters
        raise ConfigError.at(path, f"{spec.target!r}: {error}") from error
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        known = ", ".join(signature.parameters) or "none"
        problems = [
            Problem(f"{path}.{key}", f"{spec.target!r} has no such option; it has: {known}")
            for key in spec.options
            if key not in signature.parameters
        ]
        if problems:
            raise ConfigError(problems)
    try:
        signature.bind(**spec.options)
    except TypeError as error:
        raise ConfigError.at(path, f"{spec.target!r}: {error}") from error
