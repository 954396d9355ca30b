"""`python -m tests.durability.engine`: an engine whose every token follows from its prompt and its position.

- A generation that goes on from a prefix, after an abort or in another life of the service, ends in the same tokens as
  one that ran through: a prefix that was lost, doubled or mixed up shows in the answer.
- It speaks SGLang's dialect, streams where it is asked to, honours aborts, and makes tokens at a steady pace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
from dataclasses import replace
from typing import Any, Final

from bench.process import PARENT_POLL_S
from tests.support.fake_sglang import Call, FakeSGLang, Reply

__all__ = ["PROMPT_TOKENS", "answer_of", "prompt_of"]

PROMPT_TOKENS: Final = 4
_TICK_S: Final = 0.02  # between two steps of the engine
_VOCABULARY: Final = 20_000
_FIRST_ID: Final = 1000
_FORGET: Final = 512  # calls after which the fake's own records are thrown away


def prompt_of(number: int) -> list[int]:
    """The token ids of a prompt; its number is the last one."""
    return [11, 12, 13, number]


def _token(number: int, position: int) -> int:
    return _FIRST_ID + (number * 7919 + position * 31) % _VOCABULARY


def answer_of(number: int, tokens: int) -> list[int]:
    """The whole answer to a prompt: what it must be, however often it was cut on the way."""
    return [_token(number, PROMPT_TOKENS + index) for index in range(tokens)]


class SteadyEngine(FakeSGLang):
    """Makes `pace` tokens of every running generation at each step, up to its budget."""

    def __init__(self, pace: int, slots: int) -> None:
        super().__init__(slots=slots, weight_version="0", handler_cancellation=True)
        self.tokens_so_far = 0
        self._pace = pace

    def _payload(self, call: Call, reply: Reply, *, unfinished: bool = False) -> dict[str, Any]:
        """Say the tokens that belong there, in place of the fake's own."""
        given, count = call.prompt_ids, len(reply.ids(call.max_new_tokens))
        number = given[PROMPT_TOKENS - 1]
        ids = [_token(number, position) for position in range(len(given), len(given) + count)]
        return super()._payload(call, replace(reply, tokens=ids), unfinished=unfinished)

    def step(self) -> None:
        """Let time pass by one step."""
        if self.paused is not None:
            return
        for call in self.calls("running"):
            tokens = min(self._pace, call.max_new_tokens - call.tokens)
            if call.tokens + tokens == call.max_new_tokens:
                self.finish(call, Reply(tokens=call.max_new_tokens, finish="length"))
            else:
                self.advance(call, tokens)
        if len(self.requests) > _FORGET:
            for record in (self.requests, self.hits, self.aborts, self.updates):
                record.clear()


async def _serve(args: argparse.Namespace) -> None:
    parent = os.getppid()
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(SteadyEngine(args.pace, args.slots)) for _ in range(args.engines)]
        print("ready", *(engine.port for engine in engines), flush=True)  # noqa: T201 - its starter waits for this line
        looked = loop.time()
        while True:
            await asyncio.sleep(_TICK_S)
            for engine in engines:
                engine.step()
            if loop.time() - looked > PARENT_POLL_S:  # a parent's death sends no event
                looked = loop.time()
                if os.getppid() != parent:
                    return


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="tests.durability.engine", description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--pace", type=int, default=2, help="tokens of each generation at every step")
    parser.add_argument("--slots", type=int, default=8)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
