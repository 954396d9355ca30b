"""Configurations of a service on the cluster, small."""

from __future__ import annotations

from typing import Any, Final

from tests.cluster.nodes import HEAD

__all__ = ["ON_HEAD", "engine", "lines", "service"]

ON_HEAD: Final[dict[str, Any]] = {"resources": {f"at-{HEAD}": 0.01}}
"""Options of a service's actor that has to be where no test loses it."""


def engine(*arguments: str, at: str | None = None, **launch: Any) -> dict[str, Any]:
    """Make a worker: the built-in engine, on the node with that address where one is given."""
    command = ["{python}", "-m", "rollout_svc", "engine", "--host", "{host}", "--port", "{port}", "--model", "tiny"]
    held = {"CPU": 0.5} | ({} if at is None else {f"at-{at}": 0.1})
    return {"launch": {"command": [*command, *arguments], "resources": held, **launch}}


def service(*workers: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Make a configuration: one task `t` that is fed by push; whole sections are laid over small numbers."""
    task = {
        "name": "t",
        "prompts": {"push": True},
        "agent": {"name": "single_turn"},
        "judger": {"path": "tests.support.judges:Judge"},
        "sampling": {"max_tokens": 16},
    }
    return {
        "cluster": "ray",
        "service": {"port": 0},
        "workers": list(workers),
        "start_timeout_s": 60,
        "tasks": [task],
        "trainer": {"train_batch_size": 4, "prompt_repeat_k": 2, "over_sample_threshold": 0.0},
        "pause": {"deadline_s": 5.0},
        **sections,
    }


def lines(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Make prompt lines with ids of their own."""
    return [{"id": f"p{number}", "input_ids": [11, 12, 13, number % 200]} for number in range(first, first + count)]
