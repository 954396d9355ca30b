"""Which settings a journal belongs to: those under which what it holds keeps its meaning.

Invariants:

- Positions mean the same lines: the tasks' names, and their prompts' origin, content and order.
- Lines are divided among as many shards, and these are the same one's.
- Token ids mean the same text: the tokenizer and its chat template.
- Nothing else is in it, no folder above all: workers, sizes, bounds and judgers may change between two lives, and the
  files may lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rollout_svc.config import WHOLE, Config, Portion

__all__ = ["Fingerprint", "differences", "fingerprint_of"]

Fingerprint = dict[str, Any]
"""JSON; what it says of each task is found under `tasks`, by name."""


def fingerprint_of(config: Config, contents: Mapping[str, str], portion: Portion = WHOLE) -> Fingerprint:
    """Say what a journal of these settings belongs to.

    Args:
        config: the settings.
        contents: of the tasks whose prompts are a file: a digest of its lines.
        portion: which of the prompts are this service's.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for task in config.tasks:
        prompts = task.prompts
        if prompts.jsonl is not None:
            tasks[task.name] = {
                "prompts": "jsonl",
                "prompts.jsonl": contents.get(task.name),
                "prompts.shuffle": prompts.shuffle,
                "prompts.seed": prompts.seed,
                "prompts.epochs": prompts.epochs,
            }
        elif prompts.source is not None:
            tasks[task.name] = {"prompts": "source", "prompts.source": prompts.source}
        else:
            tasks[task.name] = {"prompts": "push"}
        if portion != WHOLE:
            tasks[task.name]["prompts, shard"] = str(portion)
    path, template = config.tokenizer.path, config.tokenizer.chat_template
    return {
        "tasks": tasks,
        "tokenizer.path": None if path is None else PurePath(path).name,
        "tokenizer.chat_template": template if template is None or "{" in template else PurePath(template).name,
    }


def differences(journal: Fingerprint, config: Fingerprint) -> list[str]:
    """Say in which settings two differ, one line each; empty where they are the same."""
    found = [
        f"{key}: {_told(journal.get(key))} in the journal, {_told(config.get(key))} in the configuration"
        for key in ("tokenizer.path", "tokenizer.chat_template")
        if journal.get(key) != config.get(key)
    ]
    theirs, ours = journal.get("tasks", {}), config.get("tasks", {})
    found += [f"task {name!r} is in the journal alone" for name in theirs if name not in ours]
    found += [f"task {name!r} is not in the journal" for name in ours if name not in theirs]
    for name in ours:
        then, now = theirs.get(name, ours[name]), ours[name]
        found += [
            f"task {name!r}, {key}: {_told(then.get(key))} in the journal, {_told(now.get(key))} in the configuration"
            for key in {**then, **now}
            if then.get(key) != now.get(key)
        ]
    return found


def _told(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"  # noqa: PLR2004 - of a line for people
