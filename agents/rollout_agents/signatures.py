"""What a function takes, as JSON schema, and whether some arguments are that.

| a tool's parameters | are checked |
|---|---|
| its function's own signature | by pydantic, which also turns them into what is annotated |
| a schema that was given | type, enum, required, additionalProperties, and those of properties and items |

Invariant: what is wrong is a `ValueError` in one line, for the model to read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

__all__ = ["GivenSchema", "Parameters", "Signature", "described", "refuse_arguments"]

_ARGS: Final = re.compile(r"^\s*Args:\s*$(.*?)(?=^\s*[A-Z]\w*:\s*$|\Z)", re.MULTILINE | re.DOTALL)
_ARG: Final = re.compile(r"^\s*(\w+)(?: \(.*?\))?: (.+)$", re.MULTILINE)
_NO_DEFAULT: Final = inspect.Parameter.empty
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Signature:
    """Parameters of a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read its signature; raises TypeError where it cannot be called by name, or an annotation means nothing."""
        signature = inspect.signature(function, eval_str=True)
        documented = dict(_ARG.findall(match[1])) if (match := _ARGS.search(inspect.getdoc(function) or "")) else {}
        self._any_more = False
        self._adapters: dict[str, TypeAdapter[Any]] = {}
        self._required: list[str] = []
        properties: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._any_more = True
                continue
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise TypeError(f"{name}: a model names its arguments, and this one has to be given by place")
            annotation = Any if parameter.annotation is _NO_DEFAULT else parameter.annotation
            self._adapters[name] = adapter = TypeAdapter(annotation)
            properties[name] = adapter.json_schema()
            if name in documented:
                properties[name] |= {"description": documented[name].strip()}
            if parameter.default is _NO_DEFAULT:
                self._required.append(name)
        self.schema: dict[str, Any] = {"type": "object", "properties": properties, "required": self._required}

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to call it with."""
        refuse_arguments(arguments, tuple(self._adapters), self._required, any_more=self._any_more)
        checked = dict(arguments)
        for name, adapter in self._adapters.items():
            if name in arguments:
                try:
                    checked[name] = adapter.validate_python(arguments[name])
                except ValidationError as error:
                    raise ValueError(f"{name}: {error.errors()[0]['msg']}") from None
        return checked


class GivenSchema:
    """Parameters as a schema says."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Take a schema of an object; raises TypeError where it is none."""
        if schema.get("type") != "object" or not isinstance(schema.get("properties", {}), Mapping):
            raise TypeError("parameters: expected a JSON schema of type object")
        self.schema = dict(schema)

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to call it with."""
        _look("", dict(arguments), self.schema)
        return dict(arguments)


Parameters = Signature | GivenSchema


def described(function: Callable[..., Any]) -> str:
    """What a docstring says before it tells of arguments, in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def refuse_arguments(
    arguments: Mapping[str, Any], known: tuple[str, ...], required: list[str], *, any_more: bool
) -> None:
    """Raise ValueError for a missing argument, or one too many."""
    if missing := [name for name in required if name not in arguments]:
        raise ValueError(f"missing: {', '.join(missing)}")
    if not any_more and (unknown := [name for name in arguments if name not in known]):
        raise ValueError(f"unknown: {', '.join(unknown)}; there are: {', '.join(known) or 'none'}")


def _look(where: str, value: Any, schema: Mapping[str, Any]) -> None:
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds or []
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise ValueError(f"{where or 'arguments'}: expected {' or '.join(kinds)}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where}: expected one of {schema['enum']}")
    if isinstance(value, dict):
        properties: Mapping[str, Any] = schema.get("properties", {})
        closed = schema.get("additionalProperties") is False
        refuse_arguments(value, tuple(properties), schema.get("required", []), any_more=not closed)
        for name, part in value.items():
            if isinstance(properties.get(name), Mapping):
                _look(f"{where}.{name}".lstrip("."), part, properties[name])
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for place, part in enumerate(value):
            _look(f"{where}.{place}".lstrip("."), part, schema["items"])


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and kind == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))
