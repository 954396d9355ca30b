"""A service that is killed takes the agents it runs with it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import yaml

from tests.service.test_session_agents import AGENTS, alive, soon
from tests.support.fake_sglang import FakeSGLang
from tests.support.session_site import SESSION, TEMPLATE

START_S = 30.0
"""Seconds for the service to start an agent: far more than it takes."""


async def test_nothing_of_an_agent_outlives_a_service_that_is_killed(tmp_path: Path) -> None:
    """P21: `kill -9`: neither its process, nor the child of that."""
    note, prompts, file = tmp_path / "pids", tmp_path / "p.jsonl", tmp_path / "service.yaml"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": str(note)}]}) + "\n")
    async with FakeSGLang(weight_version="0") as engine:
        task = {"name": "t", "prompts": {"jsonl": str(prompts), "epochs": 1}, "judger": {"name": "exact"}}
        task["agent"] = {"path": SESSION, "call": f"{AGENTS}:settle"}
        settings = {
            "service": {"port": 0},
            "tokenizer": {"path": "bytes", "chat_template": TEMPLATE},
            "workers": [{"url": engine.url}],
            "tasks": [task],
            "trainer": {"train_batch_size": 1, "prompt_repeat_k": 1},
        }
        file.write_text(yaml.safe_dump(settings))
        service = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollout_svc", "serve", "--config", str(file)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert await soon(note.exists, START_S)
            pids = [int(word) for word in note.read_text().split()]
            assert all(map(alive, pids))
        finally:
            service.send_signal(signal.SIGKILL)
            await service.wait()
        assert await soon(lambda: not any(map(alive, pids)))
