"""One run of somebody's agent loop: whatever comes of it is typed.

Invariants:

- What a loop raises is a failure of its sample, or what the service raised in it; a cancellation is our own only.
- A sample is generated when its loop has returned from whole turns, and no row of routed experts is missing.
"""

from __future__ import annotations

import asyncio

from rollout_svc import blame
from rollout_svc.agent import Agent, AgentContext
from rollout_svc.errors import Interrupted, SampleFailure, StaleAttempt, WorkerFailure
from rollout_svc.sample import Sample

__all__ = ["refuse_incomplete", "run_agent"]


async def run_agent(agent: Agent, sample: Sample, context: AgentContext) -> None:
    """Run somebody's loop; whatever it raises is typed."""
    try:
        with blame.contained():
            await agent.run(sample, context)
    except (Interrupted, WorkerFailure, SampleFailure, StaleAttempt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise SampleFailure("agent_error", "the agent cancelled itself") from error
    except Exception as error:
        raise SampleFailure("agent_error", blame.told(error)[0]) from error


def refuse_incomplete(sample: Sample, context: AgentContext) -> None:
    """Raise where a loop has returned and its sample is not generated.

    Raises:
        Interrupted: a turn of it was cut.
        SampleFailure: `agent_error`: it made no turn; `experts_missing`: rows of routing are.
    """
    if context.cut is not None:
        raise Interrupted(f"{sample.sample_id}: the agent went on after its turn was cut")
    if context.turns == 0:
        raise SampleFailure("agent_error", "the agent returned without a turn")
    if context.experts and (missing := sample.rows_missing):
        tokens = len(sample.prompt_ids) + sample.response_length
        message = f"{missing} of {tokens - 1} rows of routed experts are missing for {tokens} tokens"
        if sample.segments and not sample.segments[-1].by_model:  # nobody ran the model over them, and nobody will
            message += ": the agent ended with tokens of its own, after its last turn"
        raise SampleFailure("experts_missing", message)
