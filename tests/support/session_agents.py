"""Agents that know nothing of us but a base_url and a key."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

__all__ = [
    "ask",
    "ask_twice",
    "break_down",
    "break_down_inside",
    "hang",
    "hold_on",
    "leave",
    "leave_children",
    "settle",
    "wants_too_much",
]


def ask(base_url: str, api_key: str, prompt: Any) -> None:
    """Ask once, blocking."""
    body = json.dumps({"model": "m", "messages": prompt}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
        json.load(answer)


async def ask_twice(prompt: Any, base_url: str, api_key: str) -> None:
    """Ask twice, going on from the first answer."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        messages = list(prompt)
        for _ in range(2):
            async with http.post(f"{base_url}/chat/completions", json={"messages": messages}) as answer:
                [choice] = (await answer.json())["choices"]
            messages += [choice["message"], {"role": "user", "content": "on"}]


def break_down(sample_id: str) -> None:
    """Fail."""
    sys.stderr.write("all went well until here\n")
    raise ValueError(f"no idea what {sample_id} is")


async def break_down_inside() -> None:
    """Fail, in a coroutine."""
    await asyncio.sleep(0)
    raise RuntimeError("inside")


async def leave() -> None:
    """Exit, as scripts do."""
    await asyncio.sleep(0)
    sys.exit(4)


async def hang() -> None:
    """Return never, and swallow the first cancellation."""
    swallowed = False
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if swallowed:
                raise
            swallowed = True


def hold_on() -> None:
    """Return never."""
    time.sleep(3600)


def wants_too_much(base_url: str, budget: int) -> None:
    """Take what nobody gives."""


def leave_children(prompt: Any) -> None:
    """Ignore a request to stop, start another that does so too in a session of its own, and return never."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
    _stay(prompt, subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True))


def settle(prompt: Any) -> None:
    """Start another that sleeps, and return never."""
    _stay(prompt, subprocess.Popen(["sleep", "3600"]))


def _stay(prompt: Any, child: subprocess.Popen[bytes]) -> None:
    """Write both numbers where the prompt says."""
    note = Path(prompt[0]["content"])
    note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    note.with_suffix(".part").rename(note)
    time.sleep(3600)
