"""A scene: the simulated world without dice, for what was found by a seed and is kept as a test of its own.

Invariant: nothing goes wrong in a scene but what its story does; the standing checks hold in it as in a history.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollout_svc.config import AgentConfig, JudgerConfig, PromptsConfig, SamplingConfig, TaskConfig, TrainerConfig
from tests.simulation.history import History
from tests.simulation.life import Life
from tests.simulation.shape import MAX_TOKENS
from tests.simulation.world import World

__all__ = ["play"]

Story = Callable[[World, Life], Awaitable[None]]


class _Scene(History):
    """A history with a story instead of actors."""

    def __init__(self, story: Story, agent: str, judge: str) -> None:
        super().__init__(0)
        self._story = story
        self.world.faults.rates = {}
        task = TaskConfig(
            name="scene",
            prompts=PromptsConfig(push=True),
            agent=AgentConfig(path=f"tests.simulation.agents:{agent}"),
            judger=JudgerConfig(path=f"tests.simulation.judges:{judge}"),
            sampling=SamplingConfig(max_tokens=MAX_TOKENS),
        )
        trainer = TrainerConfig(train_batch_size=4, prompt_repeat_k=2, max_batch_per_worker=8)
        config = self.shape.config.model_copy(update={"tasks": (task,), "trainer": trainer})
        self.shape = type(self.shape)(
            config=config,
            urls=self.shape.urls,
            engine_batch=8,
            prompts=8,
            tasks=("scene",),
            trainers=0,
            group_size=2,
            journalled=False,
        )

    async def tell(self) -> None:
        """Begin a life and tell the story."""
        await self._begin_life()
        await self._story(self.world, self.world.life)


def play(story: Story, *, agent: str = "Plain", judge: str = "SampleJudge") -> None:
    """Tell a story in a world of its own; raises what the story or a broken promise raises."""
    scene = _Scene(story, agent, judge)
    try:
        scene.loop.run_until_complete(scene.loop.create_task(scene.tell()))
    finally:
        scene.end()
