"""A loaded service with a journal: whatever waits for the disk, the event loop does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockingError, blockbuster_ctx

from tests.support.fake_sglang import Call, FakeSGLang, Reply
from tests.support.journals import InlineJournal, memory_database
from tests.support.stage import stage

GROUPS = 48


def answered(call: Call) -> Reply:
    """Answer at once, with some tokens."""
    return Reply(tokens=[call.prompt_ids[-1]] * 16)


async def test_the_loop_never_waits_for_the_disk(tmp_path: Path) -> None:
    """Pushes, hundreds of samples, hand-backs, leases and acks, opening and closing: all of it beside the loop."""
    buffer = {"path": str(tmp_path / "journal.sqlite")}
    trainer = {"train_batch_size": 16, "prompt_repeat_k": 4}
    engine = FakeSGLang(weight_version="0")
    with blockbuster_ctx("rollout_svc") as blockbuster:
        for function in blockbuster.functions.values():
            function.can_block_in(
                "rollout_svc/assembly/prepared.py", {"prepare"}
            )  # before there is a loop, but in tests
            function.can_block_in("rollout_svc/status.py", {"rss_bytes"})  # /proc is no disk
        sections: dict[str, Any] = {"buffer": buffer, "trainer": trainer, "journal": {"partial_interval_s": 0.01}}
        async with engine, stage({"url": engine.url, "stream": True}, **sections) as made:
            await made.push(GROUPS)
            await engine.wait_running(1)
            await made.pause()
            engine.answer = answered
            await made.resume()
            for _ in range(GROUPS // 16):
                batch = await made.take(step=0, groups=16)
                await made.service.ack(batch["batch_id"])
            assert made.samples("consumed") == 4 * GROUPS
        async with engine, stage(engine, buffer=buffer, trainer=trainer, ready=False) as made:
            assert made.samples("consumed") == 4 * GROUPS


async def test_a_journal_in_the_loop_would_be_noticed() -> None:
    """The test above fails where something is written in the loop."""
    journal = InlineJournal(memory_database())
    with blockbuster_ctx("rollout_svc"), pytest.raises(BlockingError):
        journal.versioned(1)
