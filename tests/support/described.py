"""The control API's own description of itself, as a judge: may this be sent, may that be answered?"""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import orjson

from rollout_svc.rpc.openapi import describe

__all__ = ["Described"]


class Described:
    """An OpenAPI document, asked about single messages."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._paths = {re.compile(re.sub(r"\{\w+\}", "[^/]+", path)): path for path in document["paths"]}
        self._validators: dict[str, jsonschema_rs.Draft202012Validator] = {}

    @classmethod
    def of_service(cls, *, token: bool = False) -> Described:
        """Read the document of a service."""
        return cls(orjson.loads(describe(token=token)))

    def operation(self, method: str, path: str) -> dict[str, Any] | None:
        """Find what is said of a call; None: it is not there."""
        found = next((known for shape, known in self._paths.items() if shape.fullmatch(path.partition("?")[0])), None)
        said: dict[str, Any] | None = self.document["paths"].get(found, {}).get(method.lower())
        return said

    def faults_of_body(self, method: str, path: str, body: Any) -> list[str]:
        """Say what the schema has against a body; empty: it may be sent."""
        said = self.operation(method, path)
        assert said is not None
        return self._faults(said["requestBody"]["content"]["application/json"]["schema"], body)

    def faults_of_answer(self, method: str, path: str, status: int, content_type: str, body: Any) -> list[str]:
        """Say what an answer has that is not described; calls that do not exist may be anything."""
        said = self.operation(method, path)
        if said is None:
            return []
        answer = said["responses"].get(str(status))
        if answer is None:
            return [f"status {status} is not described: {body}"]
        content = answer["content"].get(content_type)
        if content is None:
            return [f"content type {content_type} is not described"]
        return self._faults(content["schema"], body)

    def _faults(self, schema: dict[str, Any], value: Any) -> list[str]:
        key = orjson.dumps(schema).decode()
        if key not in self._validators:
            whole = {"components": self.document["components"], "allOf": [schema]}
            self._validators[key] = jsonschema_rs.Draft202012Validator(whole)
        return [
            f"{'.'.join(map(str, error.instance_path))}: {error.message}"
            for error in self._validators[key].iter_errors(value)
        ]
