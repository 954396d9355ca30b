"""The directory of a run: vocabulary, prompts, weights and the service's configuration.

Invariants:

- Engines, service and trainer read the same vocabulary and start from the same weights.
- A weights file is whole when it has its name; the newest two stay, for a worker that returns late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import yaml

from rollout_svc.demo.task import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rollout_svc.demo.options import DemoOptions
    from rollout_svc.embedded.model import TinyTransformer

__all__ = ["GROUPS", "GROUP_SIZE", "RunFiles", "service_config"]

GROUPS: Final = 16
"""Prompts in one training batch."""
GROUP_SIZE: Final = 16
"""Samples of one prompt: enough for a mean and a deviation that mean something."""
MAX_STALENESS: Final = 2
"""Trainer steps that generation may be ahead."""
MAX_BATCH: Final = 128
"""Requests an engine runs at once: a batch and a fifth, over two engines."""
PROMPT_COUNT: Final = 16_384
"""Lines of the prompt file: more than a run uses, so that nothing is seen twice."""
_KEPT_WEIGHTS: Final = 2


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where a run keeps what."""

    out: Path

    @property
    def tokenizer(self) -> Path:
        """Directory of the vocabulary."""
        return self.out / "tokenizer"

    @property
    def logs(self) -> Path:
        """Directory of the children's output."""
        return self.out / "logs"

    @property
    def config(self) -> Path:
        """The service's configuration."""
        return self.out / "service.yaml"

    def weights(self, version: int) -> Path:
        """The weights of a version."""
        return self.out / "weights" / f"step-{version:04d}.safetensors"

    @property
    def first_weights(self) -> Path:
        """The weights that engines start with, also one that is started again."""
        return self.out / "weights" / "first.safetensors"

    def prepare(self, options: DemoOptions) -> None:
        """Make the directory, and write what does not depend on the engines' addresses.

        Raises:
            OSError: It cannot be written to.
        """
        self.weights(0).parent.mkdir(parents=True, exist_ok=True)
        for old in self.weights(0).parent.glob("step-*.safetensors"):
            old.unlink()
        write_tokenizer(self.tokenizer)
        options.task.write_prompts(self.out / "prompts.jsonl", options.seed, PROMPT_COUNT)

    def save_weights(self, model: TinyTransformer, version: int) -> Path:
        """Write the weights of a version, and drop those that no one will ask for."""
        from rollout_svc.embedded.model import save_weights  # noqa: PLC0415  loads torch

        path = self.weights(version).resolve()
        save_weights(model, path)
        self.weights(version - _KEPT_WEIGHTS).unlink(missing_ok=True)
        return path

    def save_first_weights(self, model: TinyTransformer) -> None:
        """Write the weights that training begins with; they stay."""
        from rollout_svc.embedded.model import save_weights  # noqa: PLC0415  loads torch

        save_weights(model, self.first_weights)

    def write_config(self, options: DemoOptions, workers: Sequence[Mapping[str, Any]]) -> None:
        """Write the service's configuration."""
        config = service_config(options, workers, str(self.tokenizer.resolve()))
        text = yaml.safe_dump(config, sort_keys=False, default_flow_style=None, width=120)
        self.config.write_text(f"# Written by the demo for this run.\n{text}", encoding="utf-8")


def service_config(options: DemoOptions, workers: Sequence[Mapping[str, Any]], tokenizer: str) -> dict[str, Any]:
    """Return the configuration of the demo's service; paths of prompts are relative to it."""
    cluster = {"cluster": "ray"} if options.cluster else {}
    experts = {"experts": _experts(options)} if options.has_experts else {}
    return {
        **cluster,
        "service": {"host": "127.0.0.1", "port": 0},
        "tokenizer": {"path": tokenizer},
        "workers": [{**worker, "max_batch": MAX_BATCH} for worker in workers],
        "start_timeout_s": 60,
        "request_timeout_s": 60,
        "tasks": [
            {
                "name": "sort",
                "prompts": {"jsonl": "prompts.jsonl", "shuffle": False},
                "agent": {"name": "single_turn"},
                "judger": {"path": "rollout_svc.demo.task:SortJudger"},
                "sampling": {"max_tokens": options.task.max_tokens, "temperature": 1.0},
            }
        ],
        "trainer": {
            "train_batch_size": GROUPS,
            "prompt_repeat_k": GROUP_SIZE,
            "over_sample_threshold": 0.2,
            "max_batch_per_worker": MAX_BATCH,
            "max_staleness": MAX_STALENESS,
        },
        "pause": {"deadline_s": 10},
        **experts,
    }


def _experts(options: DemoOptions) -> dict[str, Any]:
    """Have routed experts asked for, and say what the engines will say of them."""
    from rollout_svc.embedded.model import preset  # noqa: PLC0415  loads torch

    return {"enabled": True, **preset(options.model).routing()}
