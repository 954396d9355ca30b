"""The asynchronous loop: take a batch, train on it, swap the weights, and let generation go on meanwhile.

Invariants:

- Generation stands still from a pause to its resume and at no other time; the trainer's own step is outside.
- Every pause is resumed by its own ticket, and only once every engine reports the new weights.
- A batch is acknowledged after it was trained on: with the next take, the last one by itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch

from rollout_svc.demo.files import GROUPS
from rollout_svc.demo.grpo import collate, collate_tensors
from rollout_svc.demo.records import WINDOW, Answer, StepRecord, memory_of
from rollout_svc.demo.task import END_ID, MAX_REWARD, decode, encode, score

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout_svc.demo.files import RunFiles
    from rollout_svc.demo.grpo import GrpoTrainer
    from rollout_svc.demo.live import View
    from rollout_svc.demo.options import DemoOptions
    from rollout_svc.demo.records import History
    from rollout_svc.demo.stage import Stage
    from rollout_svc.demo.task import SortTask
    from rollout_svc.embedded.model import TinyTransformer

__all__ = ["DemoLoop", "answer_prompts", "step_record"]

TAKE_TIMEOUT_S: Final = 60.0
"""For a batch: it takes a fraction of a second, also on a busy machine."""
PAUSE_DEADLINE_S: Final = 10.0
"""For a pause: it takes milliseconds."""
STOP_SHARE: Final = 0.95
"""Share of the attainable reward at which a run ends before its last step: well above what counts as learned."""
HALF_SHARE: Final = 0.5
"""Share of the attainable reward at which the policy is half-way."""
SHOWN_PROMPTS: Final = 4
"""Prompts whose answers are shown, at the start, half-way and at the end."""
SHOWN_SEED: Final = 1_000_003
"""Added to the run's seed, so that the prompts shown are not the ones trained on."""


@dataclass(slots=True)
class DemoLoop:
    """One run of the trainer against a running service."""

    client: Stage
    trainer: GrpoTrainer
    options: DemoOptions
    files: RunFiles
    history: History
    view: View
    check: Callable[[], None]
    """Raises where a process that the run needs has died."""

    def run(self) -> None:
        """Train until the policy has learned, or the steps are used up; leaves the service paused."""
        self._show("at the start")
        batch_id = ""
        for step in range(self.options.steps):
            self.check()
            batch_id = self._step(step)
            self.view.step(self.history)
            if self._half_way(step):
                self._show("half-way")
            if len(self.history.records) > WINDOW and self.history.last_reward >= STOP_SHARE * MAX_REWARD:
                break
        self._show("at the end")
        self.client.ack(batch_id)
        self.client.pause(deadline_s=PAUSE_DEADLINE_S)
        self.history.ledger = self.client.status()["ledger"]
        self.history.memory = memory_of(self.client.memory())

    def _step(self, step: int) -> str:
        started = time.monotonic()
        batch = self._take(step)
        self.trainer.step(collate_tensors(batch["tensors"]) if "tensors" in batch else collate(batch["groups"]))
        path = self.files.save_weights(self.trainer.model, step + 1)
        paused = time.monotonic()
        report = self.client.pause(deadline_s=PAUSE_DEADLINE_S)
        self.client.update_weights(step + 1, {"kind": "disk", "path": str(path)})
        self.client.resume(report["ticket"], weight_version=step + 1)
        now = time.monotonic()
        record = step_record(step, batch, report, pause_s=now - paused, elapsed_s=now - started)
        self.history.records.append(record)
        return str(batch["batch_id"])

    def _take(self, step: int) -> dict[str, Any]:
        """Take a batch: as tensors where it brings routed experts, which no JSON holds."""
        if self.options.has_experts:
            return self.client.take_batch(step, GROUPS, TAKE_TIMEOUT_S, tensors=True)
        return self.client.take_batch(step, GROUPS, TAKE_TIMEOUT_S)

    def _half_way(self, step: int) -> bool:
        if "half-way" in self.history.answers or step + 1 == self.options.steps:
            return False
        reached = self.history.last_reward >= HALF_SHARE * MAX_REWARD
        return reached or step + 1 == (self.options.steps + 1) // 2

    def _show(self, when: str) -> None:
        answers = answer_prompts(self.trainer.model, self.options.task, self.options.seed + SHOWN_SEED)
        self.history.answers[when] = answers
        self.view.answers(f"the policy {when}", answers)


def step_record(
    step: int, batch: Mapping[str, Any], report: Mapping[str, Any], *, pause_s: float, elapsed_s: float
) -> StepRecord:
    """Make the record of a step from the batch it trained on and the report of its pause."""
    rewards, lengths = _figures(batch)
    return StepRecord(
        step=step,
        reward=sum(rewards) / len(rewards),
        pause_s=pause_s,
        aborted=batch["metrics"]["aborted"],
        continued=batch["metrics"]["continued"],
        weight_version=step + 1,
        tokens=sum(lengths),
        elapsed_s=elapsed_s,
        in_flight=sum(worker["in_flight"] for worker in report["workers"].values()),
        ledger=report["ledger"]["samples"],
    )


def _figures(batch: Mapping[str, Any]) -> tuple[list[float], list[int]]:
    """The reward of each sample of a batch, of either form, and the tokens of its response."""
    if "tensors" in batch:
        return batch["tensors"]["rewards"].tolist(), [sample["response_length"] for sample in batch["samples"]]
    samples = [sample for group in batch["groups"] for sample in group["samples"]]
    return [sample["reward"] for sample in samples], [len(sample["response_ids"]) for sample in samples]


@torch.no_grad()
def answer_prompts(model: TinyTransformer, task: SortTask, seed: int, count: int = SHOWN_PROMPTS) -> list[Answer]:
    """Answer a few prompts with the most likely token each time."""
    answers = []
    for line in islice(task.prompts(seed), count):
        ids = encode(line["text"])
        answer: list[int] = []
        while len(answer) < task.max_tokens and END_ID not in answer:
            answer.append(int(model(torch.tensor([[*ids, *answer]]))[0, -1].argmax()))
        target = [*encode(line["ground_truth"]), END_ID]
        shown = decode(answer).removesuffix(decode([END_ID]))
        answers.append(Answer(line["text"], shown, line["ground_truth"], score(answer, target)))
    return answers
