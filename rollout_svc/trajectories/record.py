"""A finished group as one line of JSON.

Invariants:

- It is the group's record in a batch, with its outcome still open: written before any filter is asked.
- What is taken from the group in the event loop are values and encoded bytes; putting them together is the writer's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from rollout_svc.group import Group

__all__ = ["Entry", "entry_of"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a line is made of.

    Attributes:
        head: the group's own keys.
        samples: encoded records of its samples.
        seconds: for each, how long it was generated and judged; None where that is not known.
    """

    head: dict[str, Any]
    samples: tuple[bytes, ...]
    seconds: tuple[tuple[float | None, float | None], ...]

    @property
    def size(self) -> int:
        """Bytes of the samples: nearly all of the line."""
        return sum(map(len, self.samples))

    def line(self) -> bytes:
        """The line, with its line feed."""
        pieces: list[bytes | memoryview] = [orjson.dumps(self.head)[:-1], b',"samples":[']
        for packed, (generate_s, judge_s) in zip(self.samples, self.seconds, strict=True):
            pieces += (
                memoryview(packed)[:-1],
                b",",
                orjson.dumps({"generate_s": generate_s, "judge_s": judge_s})[1:],
                b",",
            )
        pieces[-1] = b"]}\n"
        return b"".join(pieces)  # the one copy: it holds the interpreter while it is made


def entry_of(group: Group, *, now: float, wall: float) -> Entry:
    """Take what a line is made of from a group whose members are all COMPLETED.

    Args:
        group: the group.
        now: loop time, seconds.
        wall: the same moment in seconds since 1970, UTC.
    """
    prompt = group.prompt
    head = {
        "group_id": group.group_id,
        "task": prompt.task,
        "prompt": prompt.as_json(),
        "ground_truth": prompt.ground_truth,
        "created_at": round(wall - (now - group.created_at), 3),
        "finished_at": round(wall, 3),
        "hand_backs": group.hand_backs,
    }
    samples = tuple(sample.packed or b"{}" for sample in group.samples)
    seconds = tuple((_rounded(sample.generate_s), _rounded(sample.judge_s)) for sample in group.samples)
    return Entry(head, samples, seconds)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
