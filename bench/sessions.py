"""`python -m bench.sessions`: what a turn through a session costs the service, over what it costs a bare client.

Agents that live elsewhere speak OpenAI's API to sessions of a service, whose engine answers canned bodies after 0.3 s.
They go by turns: all ask, all are answered, and the CPU time of the service process is read in between.

| case | value | floor |
|---|---|---|
| `turn` | CPU of a turn, over conversations of 8 turns, 64 at once | a bare aiohttp client's, which asks the engine for as much with as long prompts |
| `turns128` | CPU of the 128th turn per new token, 16 conversations at once | the same of the 8th |

A turn asks 40 bytes and is answered 256 tokens; the 128th has 38,000 tokens before it. The tokenizer is the bytes one:
what a model's own tokenizer takes is not the gateway's. Both turns of `turns128` are means over five: 6 to 10, 126 to 130.
"""  # noqa: E501 - a table

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import yaml

from bench.agents import Agents
from bench.process import Child, raise_open_files
from bench.report import Point, print_report, progress
from bench.served import Caller

if TYPE_CHECKING:
    from collections.abc import Iterator

TURN_BOUND: Final = 3.0
GROWTH_BOUND: Final = 1.5
ROUNDS: Final = 5
AGENTS: Final = 64
TURNS: Final = 8
LONG_AGENTS: Final = 16
LONG_TURNS: Final = 130
NEAR: Final = 2
"""Turns on each side of the 8th, and of the 128th, that are counted with it."""
ANSWER_TOKENS: Final = 256
VOCAB: Final = 128
"""Ids of answers are below this: they are text."""
FLOOR_WINDOWS: Final = 16
WARM_TURNS: Final = 2
_FLOOR_S: Final = 120.0
TEMPLATE: Final = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Service:
    """A service whose samples wait for agents that live elsewhere.

    Attributes:
        url: of it.
        agents: at once.
    """

    def __init__(self, child: Child, url: str, agents: int) -> None:
        self.url = url
        self.agents = agents
        self._child = child
        self._caller = Caller(url)

    def cpu_s(self) -> float:
        """CPU time of its process so far."""
        return self._child.cpu_s

    def take(self) -> None:
        """Take the samples of one round, so that there is room for the next."""
        self._caller.take(self.agents)

    def close(self) -> None:
        """Leave it."""
        self._caller.close()


@contextmanager
def service(engine_url: str, agents: int) -> Iterator[Service]:
    """Run one."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "service.yaml"
        path.write_text(yaml.safe_dump(_config(engine_url, agents)))
        flags = ("--config", path, "--log-level", "warning")
        with Child("rollout_svc", "serve", *flags, ready="service.ready") as child:
            found = Service(child, child.ready_line[0].removeprefix("url="), agents)
            try:
                yield found
            finally:
                found.close()


def _config(engine_url: str, agents: int) -> dict[str, Any]:
    return {
        "service": {"port": 0},
        "tokenizer": {"path": "bytes", "chat_template": TEMPLATE},
        "workers": [{"url": engine_url, "dialect": "sglang"}],
        "tasks": [
            {
                "name": "bench",
                "prompts": {"source": "bench.workload:prompts"},
                "agent": {"name": "session"},
                "judger": {"name": "exact"},
                "sampling": {"max_tokens": 2 * ANSWER_TOKENS},
            }
        ],
        "trainer": {
            "train_batch_size": agents,
            "prompt_repeat_k": 1,
            "over_sample_threshold": 0.0,
            "max_batch_per_worker": agents,
            "allow_over_concurrency_ratio": 1.0,
            "max_staleness": 2,
        },
        "producer": {"strategy": "disaggregated"},
    }


def by_turn(served: Service, turns: int) -> tuple[list[float], list[int]]:
    """CPU of each turn, in s over all agents, and the prompt tokens of one; the conversations begin and end here."""

    async def run() -> tuple[list[float], list[int]]:
        async with Agents(served.url, "bench", served.agents) as agents:
            await agents.warm()
            cpu, prompts = [], []
            for _ in range(turns):
                before = served.cpu_s()
                prompts.append(await agents.turn())
                cpu.append(served.cpu_s() - before)
            await agents.leave()
            return cpu, prompts

    found = asyncio.run(run())
    served.take()
    return found


def bare(engine_url: str, prompts: list[int]) -> float:
    """CPU of the bare client per request, in ms, with prompts of these lengths."""
    total = FLOOR_WINDOWS * AGENTS
    arguments = ("--url", engine_url, "--in-flight", AGENTS, "--total", total, "--vocab", VOCAB)
    with Child("bench.floor", *arguments, "--prompt-tokens", *prompts, ready=None) as child:
        return float(child.read_json(_FLOOR_S)["cpu_ms_per_request"])


def turn(engine_url: str, rounds: int) -> Point:
    """A turn, over a direct call."""
    pairs = []
    with service(engine_url, AGENTS) as served:
        by_turn(served, WARM_TURNS)
        for number in range(rounds):
            cpu, prompts = by_turn(served, TURNS)
            pair = 1000 * sum(cpu) / (AGENTS * TURNS), bare(engine_url, prompts)
            pairs.append(pair)
            progress(f"turn: round {number + 1} of {rounds}: {pair[0]:.3f} ms over {pair[1]:.3f} ms")
    return Point("turn", median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), TURN_BOUND)


def turns128(engine_url: str, rounds: int) -> Point:
    """A late turn, over an early one."""
    pairs = []
    with service(engine_url, LONG_AGENTS) as served:
        by_turn(served, WARM_TURNS)
        for number in range(rounds):
            cpu, prompts = by_turn(served, LONG_TURNS)
            pair = per_new_token(cpu, prompts, 128), per_new_token(cpu, prompts, 8)
            pairs.append(pair)
            progress(f"turns128: round {number + 1} of {rounds}: {pair[0]:.2f} us a token over {pair[1]:.2f} us")
    return Point("turns128", median(pair[0] for pair in pairs), median(pair[1] for pair in pairs), GROWTH_BOUND)


def per_new_token(cpu: list[float], prompts: list[int], number: int) -> float:
    """CPU per new token around the turn of that number, counted from 1, in us."""
    first, last = number - 1 - NEAR, number - 1 + NEAR
    tokens = prompts[last] - prompts[first - 1]
    return 1e6 * sum(cpu[first : last + 1]) / (LONG_AGENTS * tokens)


CASES = {"turn": turn, "turns128": turns128}


def main() -> int:
    """Run all cases and print the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.sessions", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, default=list(CASES), help="these cases")
    options = parser.parse_args()
    raise_open_files()
    points = []
    flags = ("--port", 0, "--delay", 0.3, "--vocab", VOCAB, "--response-tokens", ANSWER_TOKENS, "--weight-version", 0)
    for name in options.only:
        with Child("bench.canned", *flags) as engine:
            points.append(CASES[name](f"http://127.0.0.1:{engine.ready_line[0]}", options.rounds))
    return 0 if print_report("sessions", points) else 1


if __name__ == "__main__":
    sys.exit(main())
