"""`multi_turn`: a conversation with an environment, or with whoever plays the user."""

from __future__ import annotations

from typing import Any, Final

from rollout_agents.conversing import Conversation
from rollout_agents.environments import Environment, SampleView, check_environment, is_async
from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.errors import ConfigError
from rollout_svc.judging import REPORTED
from rollout_svc.plugins import PluginSpec
from rollout_svc.sample import Sample
from rollout_svc.tool_calls import FORMATS, ToolFormat

__all__ = ["MultiTurn"]

_MAX_TURNS: Final = 8
_MAX_STEP_S: Final = 60.0  # long for a simulation, short for a hung one


class MultiTurn:
    """Speak with an environment until it is done, or the turns or the context are used up.

    The sample's `meta` has `turns`, and `ended`: `done`, `max_turns`, `length`, `context_full`. Rewards of steps are
    added up and reported: the judger `reported` gives their sum.
    """

    on_pause: OnPause = "park"

    def __init__(
        self,
        *,
        environment: str,
        environment_options: dict[str, Any] | None = None,
        max_turns: int = _MAX_TURNS,
        max_step_s: float = _MAX_STEP_S,
        tool_format: ToolFormat | None = None,
    ) -> None:
        """Check the options.

        Args:
            environment: `module:attr` of a class with `reset(sample)` and `step(said)`, async or not; maybe `close()`.
            environment_options: what it is made with.
            max_turns: of the model, at most.
            max_step_s: seconds for each call of the environment.
            tool_format: how the model writes calls, for the environment to find in `said["tool_calls"]`; None: it does
                not.
        """
        if tool_format is not None and tool_format not in FORMATS:
            raise ConfigError.at("tool_format", f"{tool_format!r} is none of {', '.join(FORMATS)}")
        check_positive(max_turns=max_turns, max_step_s=max_step_s)
        self._spec = PluginSpec(environment, dict(environment_options or {}))
        check_environment(self._spec)
        self._in_loop = is_async(self._spec)
        self._max_turns = max_turns
        self._max_step_s = max_step_s
        self._form: ToolFormat | None = tool_format

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Make the turns."""
        ctx.note(turns=None, ended=None, **{REPORTED: None})
        environment = Environment(self._spec, ctx.work, self._max_step_s, in_loop=self._in_loop)
        talk = Conversation(sample, ctx, max_turns=self._max_turns, form=self._form)
        await talk.begin(await environment.reset(_view(sample, ctx)))
        reward: float | None = None
        while (said := await talk.turn()) is not None:
            outcome = await environment.step(said.as_message())
            if outcome.reward is not None:
                reward = (reward or 0.0) + outcome.reward
            if outcome.done:
                talk.ended = "done"
            if talk.ended:
                break
            await talk.tell(outcome.messages)
        ctx.note(turns=talk.turns, ended=talk.ended, **{REPORTED: reward})
        return sample


def check_positive(**options: float) -> None:
    """Refuse what bounds nothing; raises ConfigError."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError.at(name, f"expected a number above 0, not {value!r}")


def _view(sample: Sample, ctx: AgentContext) -> SampleView:
    prompt = ctx.prompt
    return SampleView(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        index=sample.index,
        task=prompt.task,
        prompt=prompt.content,
        prompt_ids=list(prompt.input_ids),
        ground_truth=prompt.ground_truth,
        meta=dict(prompt.meta),
    )
