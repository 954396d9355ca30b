"""The tiny models, and the `transformers` forward that says what they must answer, in a child of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.vllm.server import ENGINE_PYTHON

__all__ = ["TOLERANCE", "Oracle"]

SCRIPT: Final = Path(__file__).with_name("oracle.py")
TOLERANCE: Final = 1e-3
"""By how much a logprob may differ: float32 sums in another order."""


class Oracle:
    """Makes the models at once; answers questions about them from a child that is started with the first one.

    Args:
        directory: where the models go: `a`, which the engine starts with, and `b`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._child: subprocess.Popen[str] | None = None
        subprocess.run([*_command("make"), directory], check=True, capture_output=True, text=True, env=_environment())

    def __repr__(self) -> str:
        return f"<Oracle {self.directory}>"

    def path(self, model: str) -> Path:
        """Where a model is."""
        return self.directory / model

    def logprobs(
        self,
        model: str,
        prompt: Sequence[int],
        ids: Sequence[int],
        temperature: float = 1.0,
        *,
        cached: str | None = None,
    ) -> list[float]:
        """The logprob of each of `ids` after `prompt`; `cached`: whose keys and values it has of the prompt."""
        return self._ask(model, prompt, ids, temperature, cached)["logprobs"]

    def behind(
        self, model: str, prompt: Sequence[int], ids: Sequence[int], *, cached: str | None = None
    ) -> list[float]:
        """By how much the likeliest token is likelier than each of `ids`; 0 where it is the greedy choice."""
        return self._ask(model, prompt, ids, 1.0, cached)["behind"]

    def is_greedy(self, model: str, prompt: Sequence[int], ids: Sequence[int], *, cached: str | None = None) -> bool:
        """Whether `ids` is what the model says at temperature 0, up to ties within the tolerance."""
        return len(ids) > 0 and max(self.behind(model, prompt, ids, cached=cached)) <= TOLERANCE

    def _ask(
        self, model: str, prompt: Sequence[int], ids: Sequence[int], temperature: float, cached: str | None
    ) -> dict[str, list[float]]:
        if self._child is None:
            self._child = subprocess.Popen(
                [*_command("serve"), self.directory],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=_environment(),
            )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        question = {"model": model, "prompt": list(prompt), "ids": list(ids), "temperature": temperature}
        question["cached"] = cached
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the forward of model {model} ended with status {self._child.wait()}"
        answer: dict[str, list[float]] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the child; idempotent."""
        if self._child is not None:
            self._child.communicate()  # closes its input, which ends it
            self._child = None


def _command(what: str) -> list[str | Path]:
    return [ENGINE_PYTHON, SCRIPT, what]


def _environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1"}
