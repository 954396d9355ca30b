"""A service over built-in engines that step when told, weights by version, and every way to hand them over.

A model's output head is larger than at birth: weights, caches and routings that are not the right ones then show in a
logprob by far more than the tolerance.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rollout_svc.embedded.model import TinyConfig, TinyTransformer, build, save_weights, write_weights
from rollout_svc.errors import NotNow
from rollout_svc.weights.publisher import WeightPublisher
from tests.embedded.helpers import CONFIG, MOE_CONFIG, GatedScheduler, Served, served
from tests.support.stage import Stage, stage
from tests.weights.proofs import oracle

CONFIGS: Final[dict[str, TinyConfig]] = {"tiny": CONFIG, "tiny-moe": MOE_CONFIG}
TOLERANCE: Final = 1e-4
LIMIT: Final = 14
"""Response tokens of every sample."""
DEADLINE_S: Final = 10.0
PROMPTS: Final[list[list[int]]] = [[7], [65, 66, 67, 68, 69], list(range(40, 80))]
"""Of one token, of a few, and of more than are padded to one length."""
VERSIONS: Final = 4


class Scene:
    """What a proof acts on.

    Attributes:
        models: by version; the engines begin with version 0.
        way: how weights are handed over.
        reached: engines that a trainer gives weights which it moves itself.
    """

    def __init__(
        self, engines: Sequence[Served], made: Stage, models: dict[int, TinyTransformer], way: str, folder: Path
    ) -> None:
        self.engines = engines
        self.made = made
        self.models = models
        self.folder = folder
        self.leaving = AsyncExitStack()
        self.reached = engines
        self.way = way
        self._publisher: WeightPublisher | None = None
        self._taken: list[str] = []

    @property
    def engine(self) -> Served:
        """The only engine, or the first."""
        return self.engines[0]

    async def begin(self, prompts: Sequence[Sequence[int]] = PROMPTS, *, samples: int | None = None) -> None:
        """Push prompts, and wait until the one engine has all of their samples."""
        await self.push(prompts)
        await self.engine.queued(len(prompts) if samples is None else samples)

    async def push(self, prompts: Sequence[Sequence[int]], name: str = "p") -> None:
        """Push prompts."""
        await self.made.push([{"id": f"{name}{place}", "input_ids": list(ids)} for place, ids in enumerate(prompts)])

    async def settled(self, samples: int) -> None:
        """Wait until so many samples are at an engine, or done."""

        def found() -> int:
            schedulers = [engine.scheduler for engine in self.engines]
            return sum(len(one.batch.jobs) + len(one.waiting) for one in schedulers) + self.made.samples("ready")

        await self.engine.until(lambda: found() == samples)

    async def hand_over(
        self, version: int, only: Sequence[Served] = (), pause: Mapping[str, Any] | None = None
    ) -> None:
        """Have every engine get a version, by the way of this scene; the stage is paused, or is to be.

        A trainer that moves weights itself reaches `only` some, where that is said.
        """
        self.reached = only or self.engines
        await WAYS[self.way](self, version, pause)

    async def fail(self, version: int) -> None:
        """Hand over what does not fit, which is refused; a trainer that moves weights itself has nobody to refuse."""
        right = self.models[version]
        if self.way == "external":
            return
        self.models[version] = build(replace(right.config, width=32), version)
        try:
            with pytest.raises(NotNow):
                await self.hand_over(version)
        finally:
            self.models[version] = right

    async def update(self, version: int, **pause: Any) -> None:
        """Pause, hand over, resume."""
        report = await self.made.pause(DEADLINE_S, **pause)
        assert report.clean, report
        await self.hand_over(version)
        await self.made.resume(weight_version=version)

    async def finish(self, groups: int = len(PROMPTS)) -> list[dict[str, Any]]:
        """Let everything run to its end, and take the samples."""
        for engine in self.engines:
            engine.scheduler.open()
        batch = await self.made.take(step=VERSIONS, groups=groups, ack=self._taken)
        self._taken = [batch["batch_id"]]
        return [sample for group in batch["groups"] for sample in group["samples"]]

    async def publisher(self) -> WeightPublisher:
        """The publisher of this scene's way: one, for all of its updates."""
        if self._publisher is None:
            made = WeightPublisher(self.made.service, way=self.way, bucket_bytes=2**16)  # type: ignore[arg-type]
            self._publisher = await self.leaving.enter_async_context(made)
        return self._publisher


async def _from_disk(scene: Scene, version: int, pause: Mapping[str, Any] | None) -> None:
    folder = scene.folder / str(version)
    folder.mkdir(exist_ok=True)
    save_weights(scene.models[version], folder)
    # A model of another width is for the engine to refuse here: what it has after that is what is proved.
    source = {"kind": "disk", "path": str(folder), "check_names": False}
    await scene.made.service.update_weights(version, source, pause)


async def _by_the_trainer(scene: Scene, version: int, pause: Mapping[str, Any] | None) -> None:
    """The trainer reaches into the engines by itself, and the service is told that it did.

    It leaves the label of an engine that is alone to the service; several it labels itself, for one of them that was
    left out before has a label that is neither the last nor the new one.
    """
    assert pause is None, "it has to reach engines that stand still already"
    tensors, several = dict(scene.models[version].state_dict()), len(scene.engines) > 1

    def give(scheduler: GatedScheduler) -> None:
        write_weights(scheduler.model, tensors)
        if several:
            scheduler.relabel(str(version))

    for engine in scene.reached:
        await engine.engine.thread.call(partial(give, engine.scheduler))
    reached = [f"w{place}" for place, engine in enumerate(scene.engines) if engine in scene.reached]
    named = {"workers": reached} if several else {}  # one alone is who was in traffic
    await scene.made.service.update_weights(version, {"kind": "external", **named})


async def _published(scene: Scene, version: int, pause: Mapping[str, Any] | None) -> None:
    await (await scene.publisher()).publish(scene.models[version].state_dict(), version, pause=pause)


WAYS: Final[dict[str, Callable[[Scene, int, Mapping[str, Any] | None], Awaitable[None]]]] = {
    "disk": _from_disk,
    "external": _by_the_trainer,
    "shm": _published,
    "distributed": _published,
}
"""Every way that weights get into the built-in engine."""

every_way = pytest.mark.parametrize("way", WAYS)
every_model = pytest.mark.parametrize("model", CONFIGS)


def trained(config: TinyConfig, version: int) -> TinyTransformer:
    """The weights of a version: other ones for each, and sure of themselves."""
    model = build(config, version)
    with torch.no_grad():
        model.head.weight.mul_(20)
    return model


def sampled(temperature: float = 1.0, members: int = 1, **more: Any) -> dict[str, Any]:
    """Settings of a task whose responses have `LIMIT` tokens."""
    asked = {"max_tokens": LIMIT, "temperature": temperature, "seed": 3, "extra": {"ignore_eos": True}}
    trainer = {"max_staleness": VERSIONS, "train_batch_size": 16, "prompt_repeat_k": members}
    return {"sampling": asked, "trainer": trainer} | more


@asynccontextmanager
async def scene(
    folder: Path,
    *,
    model: str = "tiny",
    way: str = "shm",
    engines: int = 1,
    max_running: int = 8,
    serve: Callable[..., Any] = served,
    worker: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Scene]:
    """Run engines and a service over them.

    Args:
        folder: for weights on disk.
        model: name of its shape.
        way: how weights are handed over.
        engines: how many.
        max_running: rows of each.
        serve: makes an engine, with the arguments of `served`.
        worker: further keys of each worker.
        sections: as of `stage`.
    """
    config = CONFIGS[model]
    models = {version: trained(config, version) for version in range(VERSIONS + 1)}
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(serve(config=config, max_running=max_running)) for _ in range(engines)
        ]
        for engine in running:
            write_weights(engine.scheduler.model, dict(models[0].state_dict()))
        workers = [{"url": str(engine.session._base_url), **(worker or {})} for engine in running]
        made = await stack.enter_async_context(stage(*workers, **(sampled() | sections)))
        found = Scene(running, made, models, way, folder)
        async with found.leaving:
            yield found


async def drive(engine: Served, steps: int) -> None:
    """Have an engine take so many steps, or fewer where nothing is left for it to do."""
    if not steps:
        return
    await engine.until(lambda: not engine.scheduler.frozen)  # a resume does not wait for it
    target = engine.scheduler.steps + steps
    engine.scheduler.permit(steps)
    await engine.until(lambda: engine.scheduler.steps >= target or not engine.scheduler.busy)
    engine.scheduler.forbid()


def assert_plain(scene: Scene, samples: Sequence[Mapping[str, Any]]) -> None:
    """Every logprob is that of a plain forward pass under the version which its span names."""
    for sample in samples:
        assert sample["logprobs"] == pytest.approx(oracle.plain(scene.models, sample), abs=TOLERANCE)


def assert_replayed(scene: Scene, samples: Sequence[Mapping[str, Any]], computed_anew: Sequence[int] = ()) -> None:
    """Every logprob is that of a pass replayed with the version of each position."""
    for sample in samples:
        wanted = oracle.replayed(scene.models, sample, computed_anew)
        assert sample["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)


def versions(samples: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The versions of each sample, in order."""
    return [[span["version"] for span in sample["weight_versions"]] for sample in samples]
