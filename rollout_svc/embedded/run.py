"""The engine as a process: from flags to a served port and back.

Invariants:
- Standard output gets one line, `engine.ready url=...`, once requests are served.
- A fault of the flags costs one line on standard error and exit code 2; nothing was served.
- SIGINT and SIGTERM answer what is in flight and exit 0; before serving they exit 0 at once.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rollout_svc.embedded.server import EngineServer

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

EXIT_FAILED: Final = 1
"""The engine's thread ended by a fault."""

EXIT_USAGE: Final = 2
"""The flags name something that is not there, or a port that is taken."""

MAX_RUNNING: Final = 256
"""Requests decoded together by default; the rest wait in the queue."""

MAX_RUNNING_WIDE: Final = 8
"""The same for preset `wide`, whose cache takes 20 MiB for each of them."""

PARENT_POLL_S: Final = 0.5
"""How often a process that is to die with its parent looks for it."""

SWITCH_INTERVAL_S: Final = 0.001
"""How long one thread may keep the interpreter from another: a fifth of the default, for prompt control calls."""


def run_engine(
    host: str = "127.0.0.1",
    port: int = 30000,
    model: str = "tiny",
    seed: int = 0,
    tokenizer: str | Path | None = None,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    max_running: int | None = None,
    context: int | None = None,
    weights: str | Path | None = None,
    *,
    script: str | Path | None = None,
    die_with_parent: bool = False,
    return_routed_experts: bool = True,
) -> int:
    """Serve an engine until a signal, or its parent's death, ends it.

    Args:
        host: Address to bind.
        port: Port to bind; 0 lets the system choose.
        model: Name of a preset.
        seed: What the first weights are built from.
        tokenizer: Directory with `tokenizer.json`; None for bytes.
        api_key: Key of the data routes.
        admin_api_key: Key of the admin routes.
        max_running: Requests decoded together; None for as many as suit the preset.
        context: Most tokens of a sequence; None for the preset's.
        weights: Safetensors file or directory to start from instead of fresh weights.
        script: File of what it is to say instead of what its model would; see `script_file.py`.
        die_with_parent: End once the process that started this one is gone.
        return_routed_experts: Tell routed experts to who asks, where the model has some.

    Returns:
        The exit code: 0 ended by a signal, 1 the engine failed, 2 it could not start.
    """
    parent = os.getppid() if die_with_parent else None
    if max_running is None:
        max_running = MAX_RUNNING_WIDE if model == "wide" else MAX_RUNNING
    try:
        with _leaving_on_signal():
            keys, tells = (api_key, admin_api_key), return_routed_experts
            make_server = _prepare(
                model, seed, tokenizer, keys, max_running, context, weights, script=script, tells_experts=tells
            )
    except ValueError as error:
        return _refuse(str(error))

    async def serve() -> int:
        return await _serve(make_server(), host, port, parent)

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()  # what is loaded by now stays: later collections need not walk it
    return asyncio.run(serve())


def _prepare(
    model: str,
    seed: int,
    tokenizer: str | Path | None,
    keys: tuple[str | None, str | None],
    max_running: int,
    context: int | None,
    weights: str | Path | None,
    *,
    tells_experts: bool,
    script: str | Path | None = None,
) -> Callable[[], EngineServer]:
    """Build the model, and return what makes its server inside an event loop.

    Raises:
        ValueError: A flag names something that is not there, or is out of bounds.
    """
    # Imported here: torch takes seconds, and whoever only wants the flags should not wait for it.
    from rollout_svc.embedded.auth import Keys
    from rollout_svc.embedded.engine import Engine
    from rollout_svc.embedded.model import build, load_weights, preset
    from rollout_svc.embedded.scheduler import Scheduler
    from rollout_svc.embedded.script_file import load_script
    from rollout_svc.embedded.server import EngineServer, Identity
    from rollout_svc.embedded.tokens import load_vocabulary

    if max_running < 1:
        raise ValueError(f"max_running must be at least 1, got {max_running}")
    vocabulary = load_vocabulary(tokenizer)
    said = None if script is None else load_script(script, vocabulary)
    config = preset(model, vocab_size=vocabulary.size, context=context)
    net = build(config, seed)
    if weights is not None:
        load_weights(net, weights)
    identity = Identity(
        model, str(tokenizer or "bytes"), config, max_running, seed, tells_experts and bool(config.moe_layers)
    )

    def make_server() -> EngineServer:
        engine = Engine(Scheduler(net, vocabulary, max_running=max_running))
        return EngineServer(engine, vocabulary, identity, Keys(*keys), said)

    return make_server


@contextmanager
def _leaving_on_signal() -> Iterator[None]:
    """Exit 0 at SIGINT or SIGTERM within, for there is nobody to answer yet."""

    def leave(*_: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, leave) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(server: EngineServer, host: str, port: int, parent: int | None) -> int:
    """Serve until a signal, the parent's death, or a fault of the engine."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        url = await server.start(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return _refuse(f"port {port} on {host} is in use")
        return _refuse(f"cannot listen on {host}:{port}: {error.strerror or error}")
    failed = server.engine.thread.failed
    failed.add_done_callback(lambda _: stop.set())
    sys.stdout.write(f"engine.ready url={url}\n")
    sys.stdout.flush()
    await _until(stop, parent)
    await server.close()
    if failed.done() and not failed.cancelled():
        sys.stderr.write(f"engine.failed error={failed.result()!r}\n")
        return EXIT_FAILED
    return 0


async def _until(stop: asyncio.Event, parent: int | None) -> None:
    """Wait for the stop, or for the parent to be another process than it was."""
    while not stop.is_set():
        try:
            async with asyncio.timeout(PARENT_POLL_S if parent is not None else None):
                await stop.wait()
        except TimeoutError:
            if os.getppid() != parent:
                return


def _refuse(reason: str) -> int:
    sys.stderr.write(f"engine: {reason}\n")
    return EXIT_USAGE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the engine from command-line flags.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m rollout_svc.embedded", description="The built-in engine.")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=30000, help="port to bind; 0 chooses one")
    parser.add_argument("--model", default="tiny", help="name of a preset")
    parser.add_argument("--seed", type=int, default=0, help="what the first weights are built from")
    parser.add_argument(
        "--tokenizer", default=None, metavar="DIR", help="directory with tokenizer.json; bytes if absent"
    )
    parser.add_argument("--api-key", default=None, help="key of the data routes")
    parser.add_argument("--admin-api-key", default=None, help="key of the admin routes")
    parser.add_argument("--max-running", type=int, default=None, help="requests decoded together")
    parser.add_argument("--context", type=int, default=None, help="most tokens of a sequence")
    parser.add_argument("--weights", default=None, metavar="PATH", help="safetensors to start from")
    parser.add_argument("--script", default=None, metavar="FILE", help="what to say to which prompts, as JSON rules")
    parser.add_argument("--die-with-parent", action="store_true", help="end once the starting process is gone")
    parser.add_argument(
        "--enable-return-routed-experts",
        dest="return_routed_experts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tell the experts that a request's tokens went through, where it asks and the model has some",
    )
    return run_engine(**vars(parser.parse_args(arguments)))
