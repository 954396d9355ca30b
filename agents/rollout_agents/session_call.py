"""`python -m rollout_agents.session_call module:attr`: a synchronous agent, called in a process of its own.

Invariant: what it is given comes by the environment; an error of its own ends the process, its last line says where.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["GIVEN", "bound"]

GIVEN: Final = ("base_url", "api_key", "prompt", "sample_id")
"""What an agent may have parameters for."""


def bound(call: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose what a callable takes.

    Args:
        call: the agent.
        given: values by the names in `GIVEN`.

    Raises:
        TypeError: it wants something that is not among them.
    """
    parameters = inspect.signature(call).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for parameter in named:
        strange = parameter.name not in GIVEN and parameter.default is parameter.empty
        if strange or parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"call: its parameter {parameter.name!r} is none of {', '.join(GIVEN)}, given by name")
    return {parameter.name: given[parameter.name] for parameter in named if parameter.name in given}


def _main(target: str) -> int:
    module, _, attr = target.partition(":")
    given = {
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "prompt": json.loads(os.environ["ROLLOUT_PROMPT"]),
        "sample_id": os.environ["ROLLOUT_SAMPLE_ID"],
    }
    try:
        call: Any = importlib.import_module(module)
        for part in attr.split("."):
            call = getattr(call, part)
        made = call(**bound(call, given))
        if inspect.iscoroutine(made):  # of a callable that does not say so
            asyncio.run(made)
    except Exception as error:  # noqa: BLE001 - the agent's own: told, and the process ends
        traceback.print_exc()
        [*_, last] = traceback.extract_tb(error.__traceback__)
        sys.stderr.write(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
