"""The sorting task: what it pays, what guessing gets, and one vocabulary for everyone."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.demo.task import END_ID, VOCABULARY, SortJudger, SortTask, decode, encode, score, write_tokenizer
from rollout_svc.embedded.tokens import load_vocabulary
from rollout_svc.judging import JudgedSample

if TYPE_CHECKING:
    from pathlib import Path

ids = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=12)


def uniform_answer(rng: random.Random, max_tokens: int) -> list[int]:
    answer: list[int] = []
    while len(answer) < max_tokens:
        answer.append(rng.randrange(len(VOCABULARY)))
        if answer[-1] == END_ID:
            break
    return answer


@pytest.mark.parametrize("task", [SortTask(), SortTask(length=4, max_tokens=5), SortTask(length=1, max_tokens=30)])
def test_chance_is_what_a_uniform_policy_gets(task: SortTask) -> None:
    """The calculated reward agrees with 40,000 guesses, within four standard errors."""
    rng = random.Random(7)
    target = [*encode("0" * task.length), END_ID]
    rewards = [score(uniform_answer(rng, task.max_tokens), target) for _ in range(40_000)]
    mean = sum(rewards) / len(rewards)
    error = (sum((one - mean) ** 2 for one in rewards) / len(rewards) ** 2) ** 0.5
    assert abs(mean - task.chance_reward) < 4 * error


def test_chance_is_exact_where_every_answer_can_be_listed() -> None:
    """The sum over all answers to a task small enough, each with its probability."""
    task = SortTask(length=1, max_tokens=3)
    size = len(VOCABULARY)
    target = [*encode("3"), END_ID]
    expected = 0.0
    others = [token for token in range(size) if token != END_ID]
    for tokens in range(1, task.max_tokens + 1):
        last = range(size) if tokens == task.max_tokens else (END_ID,)
        for head in itertools.product(others, repeat=tokens - 1):
            for end in last:
                expected += score([*head, end], target) / size**tokens
    assert task.chance_reward == pytest.approx(expected, abs=1e-12)


def test_chance_in_closed_form() -> None:
    """With no room past the answer it is (sum of digits hit + the end hit) over the target's length."""
    task = SortTask(length=4, max_tokens=5)
    end, digit = 1 / 32, 1 / 31
    digits = sum((1 - end) ** place * digit for place in range(1, 5))
    # A digit counts if no end came at or before its place: (1-end)^place of being alive there, 1/31 of being right.
    assert task.chance_reward == pytest.approx((digits + (1 - end) ** 4 * end) / 5, abs=1e-12)


@given(answer=ids, target=ids)
def test_a_reward_is_a_share_and_only_the_answer_gets_all(answer: list[int], target: list[int]) -> None:
    """Within 0 and 1, symmetric, and 1 for nothing but the target itself."""
    reward = score(answer, target)
    assert 0 <= reward <= 1
    assert reward == score(target, answer)
    assert (reward == 1) == (answer == target)


@given(target=ids.filter(bool), rest=ids.filter(bool))
def test_rambling_on_costs(target: list[int], rest: list[int]) -> None:
    """Tokens after the answer lower the reward, and so do tokens left out."""
    assert score([*target, *rest], target) == len(target) / (len(target) + len(rest))
    assert score(target[:-1], target) == (len(target) - 1) / len(target)


async def test_the_judger_wants_the_end_token() -> None:
    """The digits alone are right at all places but the last."""

    def judged(response_ids: list[int]) -> JudgedSample:
        return JudgedSample(
            sample_id="s",
            group_id="g",
            task="sort",
            prompt={},
            prompt_ids=encode("5203="),
            response=None,
            response_ids=response_ids,
            ground_truth="0235",
            meta={},
            finish_reason="stop",
        )

    judger = SortJudger()
    assert await judger.judge(judged([*encode("0235"), END_ID])) == 1.0
    assert await judger.judge(judged(encode("0235"))) == pytest.approx(4 / 5)
    assert await judger.judge(judged([*encode("0253"), END_ID])) == pytest.approx(3 / 5)
    assert await judger.judge(judged([])) == 0.0


@given(seed=st.integers(0, 1000), length=st.integers(1, 12), symbols=st.integers(1, 10))
def test_prompts_are_the_seeds(seed: int, length: int, symbols: int) -> None:
    """The same seed, the same lines; the ground truth is the digits sorted."""
    task = SortTask(length=length, symbols=symbols, max_tokens=length + 1)
    lines = list(itertools.islice(task.prompts(seed), 5))
    assert lines == list(itertools.islice(task.prompts(seed), 5))
    for line in lines:
        digits = line["text"].removesuffix("=")
        assert "".join(sorted(digits)) == line["ground_truth"]
        assert len(digits) == length
        assert set(digits) <= set("0123456789"[:symbols])


def test_prompt_lines_are_as_the_service_reads_them(tmp_path: Path) -> None:
    """One JSON object a line, ids unique."""
    path = tmp_path / "prompts.jsonl"
    SortTask().write_prompts(path, seed=1, count=50)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 50
    assert all(set(line) == {"id", "text", "ground_truth"} for line in lines)


def test_the_engine_reads_the_vocabulary_as_the_task_does(tmp_path: Path) -> None:
    """One token per character, the same ids, the end token known, decoding without blanks."""
    write_tokenizer(tmp_path)
    vocabulary = load_vocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.end_id) == (len(VOCABULARY), END_ID)
    text = "5203=abcs"
    assert vocabulary.encode(text) == encode(text)
    assert vocabulary.decode([*encode(text), END_ID]) == text
    assert decode([*encode("0235"), END_ID]) == "0235</s>"


@pytest.mark.parametrize("sizes", [{"length": 0}, {"symbols": 0}, {"symbols": 11}, {"length": 8, "max_tokens": 8}])
def test_sizes_that_make_no_task_are_refused(sizes: dict[str, int]) -> None:
    """A bad size is an error, not a task that cannot be solved."""
    with pytest.raises(ValueError, match=next(reversed(sizes))):
        SortTask(**sizes)


def test_the_judger_costs_the_service_no_torch() -> None:
    """The service imports the task's module for its judger."""
    code = "import sys, rollout_svc.demo, rollout_svc.demo.task; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
