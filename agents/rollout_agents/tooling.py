"""A tool that a model may call: a function of somebody's, what it takes, and what came of a call.

An async function is called in the loop, any other in a process that is killed when it takes too long.

Invariants:

- A call ends in a `Result`, whatever the tool does: what went wrong is told to the model, and counted by its kind.
- A wrong setting is a ConfigError when the service starts, with its dotted path.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import orjson

from rollout_agents.signatures import GivenSchema, Parameters, Signature, described
from rollout_svc import blame
from rollout_svc.agent import Work
from rollout_svc.errors import ConfigError
from rollout_svc.judging import JudgerError
from rollout_svc.plugins import PluginSpec, construct

__all__ = ["MOST_CHARS", "Problem", "Result", "Tool"]

MOST_CHARS: Final = 20_000
"""Characters of a tool's answer that the model is told; what is longer is cut, and says so."""

Problem = Literal["unreadable", "unknown_tool", "bad_arguments", "raised", "timeout", "too_many"]
_KEYS: Final = ("path", "options", "name", "description", "parameters", "timeout_s")


class Result(NamedTuple):
    """What came of a call.

    Attributes:
        text: for the model.
        problem: what kind of thing went wrong; None: nothing.
        told: the same for people, with the file and line where a tool raised.
    """

    text: str
    problem: Problem | None = None
    told: str = ""


class Tool:
    """One tool."""

    def __init__(self, setting: Any, where: str, max_s: float) -> None:
        """Make it of its setting.

        Args:
            setting: `module:attr`, or a mapping with it as `path`, and any of `options` (where it is a class), `name`,
                `description`, `parameters` (JSON schema), `timeout_s`.
            where: its dotted path, for errors.
            max_s: seconds that its calls may take, and do where it does not say.
        """
        given: Any = {"path": setting} if isinstance(setting, str) else setting
        if not isinstance(given, Mapping) or not isinstance(given.get("path"), str):
            raise ConfigError.at(where, f"expected module:attr, or a mapping with it as path, not {setting!r:.200}")
        if unknown := [key for key in given if key not in _KEYS]:
            raise ConfigError.at(f"{where}.{unknown[0]}", f"no such key; there are: {', '.join(_KEYS)}")
        self._spec = PluginSpec(given["path"], dict(given.get("options") or {}))
        function = construct(self._spec, where)
        if not callable(function):
            raise ConfigError.at(where, f"{given['path']!r} cannot be called")
        plain = function if inspect.isroutine(function) else function.__call__
        self._function = function
        self._is_async = inspect.iscoroutinefunction(plain)
        self.name = str(given.get("name") or getattr(function, "__name__", type(function).__name__))
        self.timeout_s: float = given.get("timeout_s", max_s)
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or self.timeout_s <= 0:
            raise ConfigError.at(f"{where}.timeout_s", f"expected a number above 0, not {self.timeout_s!r}")
        if self.timeout_s > max_s:
            raise ConfigError.at(f"{where}.timeout_s", f"{self.timeout_s:g} is more than max_tool_s = {max_s:g}")
        self._parameters: Parameters
        try:
            schema = given.get("parameters")
            self._parameters = Signature(plain) if schema is None else GivenSchema(schema)
        except Exception as error:  # whatever an annotation means, or does not
            raise ConfigError.at(f"{where}.parameters", f"{self.name}: {type(error).__name__}: {error}") from error
        self._description = given.get("description") or described(plain) or described(type(function))

    def as_function(self) -> dict[str, Any]:
        """As OpenAI's API, and a chat template, have it."""
        told = {"name": self.name, "description": self._description, "parameters": self._parameters.schema}
        return {"type": "function", "function": told}

    async def call(self, written: str, work: Work) -> Result:
        """Call it.

        Args:
            written: the arguments, JSON text of an object.
            work: of the sample's run.
        """
        try:
            arguments = self._parameters.check(orjson.loads(written))
        except ValueError as error:
            return Result(f"error: {self.name}: arguments: {error}", "bad_arguments")
        try:
            if self._is_async:
                return Result(_text(await work.bounded(self._function(**arguments), self.timeout_s)))
            sent = (self._spec, self.name, arguments)
            result: Result = await work.call(_HERE, "__call__", sent, self.timeout_s)
        except TimeoutError as error:
            told = f"{self.name}: not done in {self.timeout_s:g} s {error}".strip()
            return Result(f"error: {self.name}: no answer in {self.timeout_s:g} s", "timeout", told)
        except Exception as error:  # noqa: BLE001 - somebody's code, or its process that died
            return _raised(self.name, error)
        return result


def in_process(sent: tuple[PluginSpec, str, dict[str, Any]]) -> Result:
    """Call a tool that is not async."""
    spec, name, arguments = sent
    try:
        return Result(_text(construct(spec, "tools")(**arguments)))
    except BaseException as error:  # noqa: BLE001 - somebody's code, which may exit
        return _raised(name, error)


_HERE: Final = PluginSpec("rollout_agents.tooling:in_process", {})


def _raised(name: str, error: BaseException) -> Result:
    """Tell the model what a tool raised, and people where: paths of this machine are none of its business."""
    if isinstance(error, JudgerError):
        return Result(f"error: {name}: it was ended", "raised", f"{name}: {error}")
    told = blame.told(error)[0]
    try:
        said = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001 - an object of theirs
        said = type(error).__name__
    return Result(_encodable(f"error: {name}: {said}")[:MOST_CHARS], "raised", f"{name}: {told}")


def _text(result: Any) -> str:
    said = result if isinstance(result, str) else orjson.dumps(result, default=str, option=_OPTIONS).decode()
    said = said if len(said) <= MOST_CHARS else f"{said[:MOST_CHARS]}… (cut: {len(said)} characters)"
    return _encodable(said)


def _encodable(said: str) -> str:
    """Half a character has no tokens: names of files and bad decoders make such."""
    return said.encode(errors="replace").decode()


_OPTIONS: Final = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
