"""Tools for `tools`: good ones, and such as misbehave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, NoReturn

__all__ = ["Lookup", "add", "exits", "forks", "halves", "hangs", "pid", "raises", "sleeps", "unclear", "weather"]


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


async def weather(city: str, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """Tell the weather."""
    await asyncio.sleep(1.0)
    return {"city": city, "degrees": 20, "unit": unit}


async def sleeps(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return f"slept {seconds:g}"


async def raises(text: str = "", *, half: bool = False) -> NoReturn:
    """Raise, half a character if wanted."""
    raise ValueError("half \ud800" if half else text)


async def halves() -> str:
    """Answer with half a character."""
    return "a half: \udcff"


class Lookup:
    """Look a word up."""

    def __init__(self, *, words: dict[str, str]) -> None:
        self.words = words

    async def __call__(self, word: str) -> str:
        return self.words[word]


def pid() -> int:
    """Tell the process."""
    return os.getpid()


def exits(code: int) -> NoReturn:
    """Exit."""
    sys.exit(code)


def hangs(fifo: str) -> NoReturn:
    """Tell the process through a pipe in the file system, then hang."""
    Path(fifo).write_text(f"{os.getpid()}\n", encoding="ascii")
    while True:
        time.sleep(60)


def forks(fifo: str) -> NoReturn:
    """Start another process, tell both, and hang."""
    child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
    Path(fifo).write_text(f"{os.getpid()}\n{child.pid}\n", encoding="ascii")
    while True:
        time.sleep(60)


def unclear(*places: int) -> int:
    """Take arguments by place only."""
    return sum(places)
