"""`tools`: function calls in OpenAI's form, made by the model, answered by functions of somebody's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from rollout_agents.conversing import Conversation
from rollout_agents.multi_turn import check_positive
from rollout_agents.tooling import Result, Tool
from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.errors import ConfigError
from rollout_svc.sample import Sample
from rollout_svc.tool_calls import FORMATS, ToolCall, ToolFormat

__all__ = ["Tools"]

_MAX_TURNS: Final = 8
_MAX_TOOL_S: Final = 30.0  # a search or a query; what takes longer says so
_MOST_ERRORS: Final = 3
_MAX_CALLS: Final = 16  # of one turn: a model that repeats itself writes hundreds


class Tools:
    """Let the model call tools until it answers without a call, or the turns or the context are used up.

    What goes wrong with a call is told to the model as the tool's answer. The sample's `meta` has `turns`; `ended`:
    `answered`, `max_turns`, `length`, `context_full`; `tool_calls`, how many were made; and `tool_problems`, how many
    of them went wrong, by kind: `unreadable`, `unknown_tool`, `bad_arguments`, `raised`, `timeout`, `too_many`. Of what
    was raised, `tool_errors` has the first three, with the file and line.
    """

    on_pause: OnPause = "park"

    def __init__(
        self,
        *,
        tools: Sequence[Any],
        max_turns: int = _MAX_TURNS,
        max_tool_s: float = _MAX_TOOL_S,
        max_calls: int = _MAX_CALLS,
        tool_format: ToolFormat = "hermes",
    ) -> None:
        """Check the options.

        Args:
            tools: `module:attr` of each, or a mapping; see `tooling.Tool`.
            max_turns: of the model, at most; the calls of the last are not made.
            max_tool_s: seconds for a call, where its tool has no `timeout_s` of its own, which may be less.
            max_calls: of one turn; those beyond are not made, and told so.
            tool_format: how the model writes calls.
        """
        if tool_format not in FORMATS:
            raise ConfigError.at("tool_format", f"{tool_format!r} is none of {', '.join(FORMATS)}")
        check_positive(max_turns=max_turns, max_tool_s=max_tool_s, max_calls=max_calls)
        if isinstance(tools, str) or not tools:
            raise ConfigError.at("tools", f"expected a list of at least one tool, not {tools!r}")
        made = [Tool(setting, f"tools.{index}", max_tool_s) for index, setting in enumerate(tools)]
        self._tools = {tool.name: tool for tool in made}
        if len(self._tools) < len(made):
            raise ConfigError.at("tools", f"two have the same name: {', '.join(tool.name for tool in made)}")
        self._functions = [tool.as_function() for tool in made]
        self._max_turns = max_turns
        self._max_calls = max_calls
        self._form: ToolFormat = tool_format

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Make the turns, and the calls between them."""
        ctx.note(turns=None, ended=None, tool_calls=None, tool_problems=None, tool_errors=None)
        talk = Conversation(sample, ctx, max_turns=self._max_turns, form=self._form, functions=self._functions)
        await talk.begin()
        made, problems, errors = 0, Counter[str](), list[str]()
        while (said := await talk.turn()) is not None:
            if not said.calls:
                talk.ended = talk.ended or "answered"
            if talk.ended:
                break
            results = await ctx.work.side_by_side(
                [self._answer(call, place, ctx) for place, call in enumerate(said.calls)]
            )
            made += len(results)
            problems.update(result.problem for result in results if result.problem is not None)
            errors += [result.told for result in results if result.told]
            await talk.tell([_message(call, result) for call, result in zip(said.calls, results, strict=True)])
        ctx.note(turns=talk.turns, ended=talk.ended, tool_calls=made)
        ctx.note(tool_problems=dict(problems) or None, tool_errors=errors[:_MOST_ERRORS] or None)
        return sample

    async def _answer(self, call: ToolCall, place: int, ctx: AgentContext) -> Result:
        if place >= self._max_calls:
            return Result(f"error: not called: more than {self._max_calls} calls in one turn", "too_many")
        if call.problem:
            return Result(f"error: this call cannot be read: {call.problem}", "unreadable")
        tool = self._tools.get(call.name)
        if tool is None:
            return Result(f"error: no tool {call.name!r:.100}; there are: {', '.join(self._tools)}", "unknown_tool")
        return await tool.call(call.arguments, ctx.work)


def _message(call: ToolCall, result: Result) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": result.text}
