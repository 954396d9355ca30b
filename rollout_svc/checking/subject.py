"""What is to be checked, made from what was typed.

Invariant: what cannot be used is a ConfigError that names the argument or the option.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from rollout_svc.config import AgentConfig, JudgerConfig, PluginConfig
from rollout_svc.errors import ConfigError
from rollout_svc.plugins import Kind, PluginSpec, construct, resolve

__all__ = ["made", "options_of", "prompt_line", "spec_of"]

_DEFAULT: Final = {"messages": [{"role": "user", "content": "2 + 2 = ?"}], "ground_truth": "4"}
_CONFIGS: Final[dict[str, type[PluginConfig]]] = {"agents": AgentConfig, "judgers": JudgerConfig}


def options_of(given: Sequence[str]) -> dict[str, Any]:
    """Read `key=value`, the value as JSON where it is, else as text."""
    options: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError.at("--option", f"expected key=value, not {item!r}")
        try:
            options[key] = orjson.loads(value)
        except ValueError:
            options[key] = value
    return options


def spec_of(target: str, options: dict[str, Any], kind: Kind) -> PluginSpec:
    """Find `module:attr`, in the folder one stands in too, or a name that is installed."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if ":" in target:
        return PluginSpec(target, options)
    return resolve(_CONFIGS[kind](name=target, **options), kind, kind[:-1])


def made(spec: PluginSpec, path: str) -> Any:
    """Make it, as the service does."""
    return construct(spec, path)


def prompt_line(file: Path | None) -> dict[str, Any]:
    """Read the first line of a file of prompts; without one, a sum."""
    if file is None:
        return dict(_DEFAULT)
    try:
        text = next(line for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        line = orjson.loads(text)
    except StopIteration:
        raise ConfigError.at("--prompt", f"{file} has no prompts") from None
    except (OSError, ValueError) as error:
        raise ConfigError.at("--prompt", f"cannot read {file}: {error}") from error
    if not isinstance(line, dict):
        raise ConfigError.at("--prompt", f"{file}: expected an object, not {type(line).__name__}")
    return line
