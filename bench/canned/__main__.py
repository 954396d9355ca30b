"""Prints `ready PORT...` when it listens, one port per engine; ends when its parent does."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
from typing import Any

from bench.canned import lmdeploy, sglang, vllm
from bench.canned.bodies import Bodies
from bench.canned.connection import Connection
from bench.canned.durations import SPREADS, durations
from bench.canned.engine import Engine
from bench.process import PARENT_POLL_S, raise_open_files

BACKLOG = 65536
"""Listen queue asked for; the kernel cuts it to what it allows."""
DIALECTS = {"sglang": sglang, "vllm": vllm, "lmdeploy": lmdeploy}


def _engine(args: argparse.Namespace, number: int) -> Engine:
    dialect = DIALECTS[args.dialect]

    def answer(ids: list[int], logprobs: list[float], finish: str, label: str) -> dict[str, Any]:
        found: dict[str, Any] = dialect.answer(ids, logprobs, finish, label)
        return found | {"meta_info": found["meta_info"] | {"routed_experts": args.routed_experts}}

    bodies = Bodies(
        dialect.answer if args.routed_experts is None else answer,
        response_tokens=args.response_tokens,
        vocab=args.vocab,
        weight_version=args.weight_version,
    )
    rng = random.Random(args.seed + number)
    duration_s = None if args.hold else durations(args.spread, args.delay, rng)
    engine = Engine(bodies, duration_s=duration_s, partial_tokens=args.partial_tokens)
    dialect.speak(engine)
    return engine


async def _serve(args: argparse.Namespace) -> None:
    raise_open_files()
    loop = asyncio.get_running_loop()
    ports = []
    for number in range(args.engines):
        engine = _engine(args, number)
        port = 0 if args.port == 0 else args.port + number
        server = await loop.create_server(lambda engine=engine: Connection(engine), args.host, port, backlog=BACKLOG)
        ports.append(server.sockets[0].getsockname()[1])
    gc.freeze()
    parent = os.getppid()
    print("ready", *ports, flush=True)
    while os.getppid() == parent:  # noqa: ASYNC110 - a parent's death sends no event
        await asyncio.sleep(PARENT_POLL_S)


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="bench.canned", description="An engine process that answers canned bodies.")
    parser.add_argument("--dialect", choices=DIALECTS, default="sglang")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen")
    parser.add_argument("--port", type=int, default=0, help="of the first engine; 0: any free one for each")
    parser.add_argument("--engines", type=int, default=1, help="engines in this process, each at a port of its own")
    parser.add_argument("--delay", type=float, default=0.3, help="mean time from arrival to answer, seconds")
    parser.add_argument("--spread", choices=SPREADS, default="fixed", help="how that time is drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the times drawn")
    parser.add_argument("--hold", action="store_true", help="hold every generation until it is aborted")
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--partial-tokens", type=int, default=128, help="ids in the answer of an aborted request")
    parser.add_argument("--vocab", type=int, default=32000, help="ids are below this")
    parser.add_argument(
        "--routed-experts", metavar="KEY", help="what each answer says of them, in lmdeploy's and sglang's"
    )
    parser.add_argument("--weight-version", default="default")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
