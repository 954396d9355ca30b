"""Routed experts in the journal of a process that is killed: whole, byte for byte, or not there with their group."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from random import Random

import numpy as np

from rollout_svc.buffer.journal.reading import read_journal
from tests.durability.routed import HALF, LAYERS, TOKENS, TOP_K
from tests.support.routed import routing

LIVES = 2
LINES = (3, 14)
"""What a life says before it is killed: so many lines, and then for another moment of a few milliseconds."""


async def life(journal: Path, name: str, rng: Random) -> list[list[str]]:
    """Run a service on the journal and kill it; returns what it said."""
    code = [sys.executable, "-m", "tests.durability.routed", str(journal), name]
    child = await asyncio.create_subprocess_exec(*code, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    try:
        async with asyncio.timeout(60):
            lines = [await child.stdout.readline() for _ in range(rng.randint(*LINES))]
            await asyncio.sleep(rng.random() / 50)
    finally:
        child.kill()
        rest = await child.stdout.read()
        await child.wait()
    said = [line.split() for line in (b"".join(lines) + rest).decode().splitlines()]
    assert said[0] == ["up"], said
    return said


async def test_a_killed_service_loses_none_and_keeps_none_too_long(tmp_path: Path) -> None:
    """What was said to be durable is there byte for byte; what was acknowledged or failed left nothing."""  # P31 P28
    journal, rng = tmp_path / "journal.db", Random(7)
    said: list[list[str]] = []
    for number in range(LIVES):
        said += await life(journal, f"l{number}", rng)
    connection = sqlite3.connect(journal)
    found = {group.group_id: group for group in read_journal(connection).groups}
    for group in found.values():
        for index, state in enumerate(group.samples):
            name = f"{group.group_id}.{index}"
            if group.account == "aborted" and state.experts is None:
                assert state.packed is None  # it was admitted, and no more
                assert not state.segments
                continue
            half = "h" in group.group_id
            rows, dtype = (HALF, "uint16") if half else (TOKENS + index + 2, "uint8")
            assert state.experts.dtype == dtype
            assert np.array_equal(state.experts, routing(name, rows, dtype, LAYERS, TOP_K))
    going = {line[1] for line in said if line[0] == "going"}
    for what, group_id in (line for line in said if len(line) == 2):
        if what in ("ready", "half") and group_id not in going:
            assert all(state.experts is not None for state in found[group_id].samples)
        if what == "gone":
            assert group_id not in found
    routed = {group_id for (group_id,) in connection.execute("SELECT DISTINCT group_id FROM experts")}
    connection.close()
    assert routed <= found.keys()
    assert len([line for line in said if line[0] == "ready"]) >= LIVES
