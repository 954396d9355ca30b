"""Who is stuck, asked from a shell and by a signal, of a service in a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp

from tests.support.commands import run
from tests.support.fake_sglang import FakeSGLang
from tests.test_cli import free_port, served


async def test_who_is_stuck_from_a_shell_and_by_a_signal(tmp_path: Path) -> None:
    """`stuck` prints the record, or a line for each, and SIGUSR1 writes the same lines to the log."""  # P22
    pause = {"deadline_s": 0.05}
    async with (
        FakeSGLang(weight_version="0") as engine,
        served(tmp_path, workers=[{"url": engine.url}], pause=pause) as service,
    ):
        url = await service.word("service.ready")
        body = {"task": "t", "prompts": [{"input_ids": [1]}]}
        async with aiohttp.ClientSession() as session, session.post(url + "/v1/prompts", json=body):
            pass
        await engine.wait_running(1)
        answer = await asyncio.to_thread(run, "stuck", "--url", url, "--older-than", "0", "--json")
        [sample] = json.loads(answer.stdout)["samples"]
        assert (sample["where"], sample["worker"]) == ("generating", "w0")
        shown = await asyncio.to_thread(run, "stuck", "--url", url, "--older-than", "0")
        counts, line = shown.stdout.splitlines()
        assert (shown.returncode, counts) == (0, "under way for over 0 s: 1 generating")
        assert line.startswith(f"{sample['sample_id']} generating(w0) since_s=")
        nobody = await asyncio.to_thread(run, "stuck", "--url", url, "--older-than", "1e9")
        assert nobody.stdout == "under way for over 1e+09 s: nobody\n"
        service.process.send_signal(signal.SIGUSR1)
        counted, told = await service.logged("stuck.counts"), await service.logged("stuck.sample")
        assert counted["counts"] == {"generating": 1}
        assert (told["sample_id"], told["where"], told["worker"]) == (sample["sample_id"], "generating", "w0")
        assert told["awaits"] == sample["awaits"]
        service.process.send_signal(signal.SIGTERM)
        assert (await service.ended())[0] == 0


async def test_a_signal_before_anything_is_under_way_is_answered(tmp_path: Path) -> None:
    """While engines load, SIGUSR1 says that nobody is stuck, and the service lives on."""
    async with served(tmp_path, workers=[{"url": f"http://127.0.0.1:{free_port()}"}]) as service:
        await service.word("service.listening")
        service.process.send_signal(signal.SIGUSR1)
        counted = await service.logged("stuck.counts")
        assert (counted["state"], counted["counts"]) == ("starting", {})
        service.process.send_signal(signal.SIGTERM)
        assert (await service.ended())[0] == 0
