"""`python -m tests.durability.routed JOURNAL LIFE`: a service whose samples have routed experts, until it is killed.

It says on its standard output what is durable by then: `ready GROUP`, `half GROUP`, `gone GROUP`. Each array tells
whose it is (`tests.support.routed`), so that whoever reads the journal knows what has to be there.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque

from rollout_svc.buffer.recovered import Position
from rollout_svc.group import Group
from tests.support.groups import make_prompt, segment
from tests.support.routed import own, ready_group, routing
from tests.support.stage import Stage, stage

__all__ = ["HALF", "LAYERS", "TOKENS", "TOP_K"]

LAYERS, TOP_K = 16, 8
TOKENS = 10_000
"""Of a member; 1.3 MB of experts, two rows of the journal."""
HALF = 5_000
"""Rows of a member that is not finished."""


def say(*words: str) -> None:
    """Tell whoever counts."""
    print(*words, flush=True)  # noqa: T201 - this is a command


async def put(made: Stage, group_id: str, position: int) -> None:
    """Have a finished group in the buffer, and on the disk."""
    parts = made.parts
    prompt = make_prompt(prompt_id=group_id)
    group = ready_group(parts.ledger, parts.handles, group_id, tokens=TOKENS, layers=LAYERS, top_k=TOP_K, prompt=prompt)
    parts.storage.admitted(group, Position(position))
    parts.storage.kept(group.samples[0])
    await parts.storage.save(group)
    parts.buffer.put_ready(group)
    say("ready", group_id)


async def begin(made: Stage, group_id: str, position: int) -> Group:
    """Have half of a group handed back, on the disk."""
    parts = made.parts
    prompt = make_prompt(prompt_id=group_id)
    group = Group(group_id=group_id, prompt=prompt, size=1, lane="train", ledger=parts.ledger)
    parts.storage.admitted(group, Position(position))
    group.start()
    attempt = group.samples[0].hand_out()
    experts = own(parts.handles, routing(f"{group_id}.0", HALF, "uint16", LAYERS, TOP_K))
    group.samples[0].extend(attempt, segment([1] * HALF), experts)
    group.hand_back()
    parts.storage.handed_back(group)
    await parts.storage.flush()
    say("half", group_id)
    return group


async def live(journal: str, life: str) -> None:
    """Put, begin, lend, acknowledge and fail groups for ever."""
    # No weights ever come here: nothing is to be too old for the steps that are taken.
    async with stage(ready=False, buffer={"path": journal}, trainer={"max_staleness": 1000}) as made:
        halves: deque[Group] = deque()
        say("up")
        for n in range(10_000):
            await put(made, f"{life}r{n}", 2 * n + 1)
            halves.append(await begin(made, f"{life}h{n}", 2 * n + 2))
            if n % 2:
                batch = await made.service.lease_batch(n, 1, 10.0)
                say("going", batch.groups[0].group_id)
                await made.service.ack(batch.batch_id)
                say("gone", batch.groups[0].group_id)
                half = halves.popleft()
                say("going", half.group_id)
                half.settle("failed", "a test")
                made.parts.storage.settled(half)
                await made.parts.storage.flush()
                say("gone", half.group_id)


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1], sys.argv[2]))
