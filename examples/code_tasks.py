"""Programming tasks with tests: a prompt source for the judger `code`, which runs the answers in a sandbox.

prompts: {source: "code_tasks:tasks"}

python examples/code_tasks.py > code.script.jsonl     # what the built-in engine is to say: not all of it is right
"""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

TASKS = (
    (
        "largest",
        "Write a function largest(numbers) that returns the largest of a list of numbers.",
        [{"args": [[3, 9, 2]], "expected": 9}, {"args": [[-4, -7]], "expected": -4}],
        "def largest(numbers):\n    return max(numbers)",
    ),
    (
        "backwards",
        "Write a function backwards(text) that returns a text from its end to its beginning.",
        [{"args": ["abc"], "expected": "cba"}, {"args": [""], "expected": ""}],
        "def backwards(text):\n    return text[::-1]",
    ),
    (
        "vowels",
        "Write a function vowels(text) that counts the vowels of a text.",
        [{"args": ["banana"], "expected": 3}, {"args": ["Otto"], "expected": 2}],
        "def vowels(text):\n    return sum(letter in 'aeiou' for letter in text)",  # it forgets capitals: half right
    ),
    (
        "forever",
        "Write a function forever(number) that returns the number.",
        [{"args": [1], "expected": 1}],
        "def forever(number):\n    while True:\n        pass",  # it never ends: killed, and worth nothing
    ),
)


def tasks() -> Iterator[dict[str, Any]]:
    """All tasks, again and again."""
    for round_number in count():
        for name, wanted, cases, _ in TASKS:
            yield {
                "id": f"{name}-{round_number}",
                "text": f"{wanted}\n",
                "ground_truth": {"function": name, "cases": cases},
            }


def script() -> Iterator[dict[str, Any]]:
    """What an engine without a mind of its own is to say."""
    for _, wanted, _, code in TASKS:
        yield {"match": {"ends_with": f"{wanted}\n"}, "say": f"```python\n{code}\n```"}


if __name__ == "__main__":
    for rule in script():
        print(json.dumps(rule))
