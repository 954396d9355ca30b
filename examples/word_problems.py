"""Arithmetic word problems, made as they are needed: a prompt source without end that keeps its own position.

prompts: {source: "word_problems:WordProblems"}

python examples/word_problems.py 8 > problems.script.jsonl     # what the built-in engine is to say to the first 8
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

STORIES = (
    ("{name} has {a} apples and buys {b} more. How many are there now?", "{a} + {b}"),
    ("{name} has {a} eggs and breaks {b} of them. How many are whole?", "{a} - {b}"),
    ("{name} fills {a} boxes with {b} pens each. How many pens is that?", "{a} * {b}"),
    ("{name} has {a} coins, spends {b} and finds {c}. How many are left?", "{a} - {b} + {c}"),
)
NAMES = ("Ada", "Emil", "Kofi", "Mei", "Ravi", "Zoe")


def problem(number: int) -> tuple[str, str, int]:
    """The story, the sum and the answer of one problem: the same number gives the same, in every process."""
    draw = random.Random(number)
    story, term = draw.choice(STORIES)
    b = draw.randint(2, 9)
    numbers = {"a": draw.randint(b, 40), "b": b, "c": draw.randint(1, 9)}
    a, c = numbers["a"], numbers["c"]
    answer = {STORIES[0][1]: a + b, STORIES[1][1]: a - b, STORIES[2][1]: a * b, STORIES[3][1]: a - b + c}[term]
    return story.format(name=draw.choice(NAMES), **numbers), term.format(**numbers), answer


class WordProblems:
    """Iterates over all problems; `state` and `restore` let a service that was killed go on where it was."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            story, term, answer = problem(self.number)
            line = {
                "id": f"problem-{self.number}",
                "messages": [{"role": "user", "content": story}],
                "ground_truth": str(answer),
                "meta": {"sum": term},
            }
            self.number += 1
            yield line

    def state(self) -> int:
        """Where it stands: how many it has made."""
        return self.number

    def restore(self, state: int) -> None:
        """Go on from there."""
        self.number = state


def script(count: int) -> Iterator[dict[str, Any]]:
    """What an engine without a mind of its own is to say: a call of the calculator, then the answer it gave."""
    yield {"turn": "<|assistant|>"}
    for number in range(count):
        story, term, answer = problem(number)
        call = json.dumps({"name": "calculate", "arguments": {"expression": term}})
        yield {"match": {"contains": story}, "say": [f"<tool_call>{call}</tool_call>", f"The answer is {answer}."]}


if __name__ == "__main__":
    for rule in script(int(sys.argv[1])):
        print(json.dumps(rule))
