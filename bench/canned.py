"""An engine process that answers canned SGLang bodies after a delay, at the least CPU: `python -m bench.canned`.

- Prints `ready PORT` when it listens; ends when its parent does.
- Every answer has as many ids as the request allows, up to `--response-tokens`, each with its logprob; the bytes are
  computed once per length, and only the request id and the prompt length are put in.
- `/abort_request` (one id exactly, or all) answers what it names at once with `--partial-tokens` ids, reason `abort`.
- While paused, generations are kept: new ones are held, due ones wait for continue. Mode `abort` first ends them all.
- It believes its clients: bodies are searched for the few fields needed, not validated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import re
import struct
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import orjson

from bench.process import raise_open_files

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Bodies", "Connection", "Engine"]

BACKLOG = 65536
"""Listen queue asked for; the kernel cuts it to what it allows."""
PARENT_POLL_S = 0.5
"""How often the parent is looked for, in seconds."""
TICK_S = 0.001
"""Answers due within this time of each other leave together, in seconds."""
SEED = 17
"""Seed of the canned ids and logprobs."""
MAX_RUNNING = 65536
"""`max_running_requests` it reports: no limit of its own."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_RID = re.compile(rb'"rid"\s*:\s*"([^"\\]+)"')
_BUDGET = re.compile(rb'"max_new_tokens"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"input_ids"\s*:\s*\[([^\]]*)\]')
_JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Bodies:
    """Answers as bytes in three pieces, around the request id and the prompt length; built once per length."""

    def __init__(self, response_tokens: int, vocab: int, weight_version: str) -> None:
        rng = random.Random(SEED)
        self._ids = [rng.randrange(vocab) for _ in range(response_tokens)]
        # as engines send them: float32 values, printed as doubles
        self._logprobs = [struct.unpack("f", struct.pack("f", -rng.expovariate(1.0)))[0] for _ in self._ids]
        self.response_tokens = response_tokens
        self._cache: dict[tuple[int, str], tuple[bytes, bytes, bytes]] = {}
        self.weight_version = weight_version

    def set_version(self, weight_version: str) -> None:
        """Report this weight label from now on."""
        self.weight_version = weight_version
        self._cache.clear()

    def pieces(self, tokens: int, finish: str) -> tuple[bytes, bytes, bytes]:
        """The three pieces of an answer with that many ids; `finish`: stop, length or abort."""
        key = (tokens, finish)
        pieces = self._cache.get(key)
        if pieces is None:
            pieces = self._cache[key] = self._build(tokens, finish)
        return pieces

    def _build(self, tokens: int, finish: str) -> tuple[bytes, bytes, bytes]:
        ids = self._ids[:tokens]
        reason: dict[str, Any] = {"type": finish}
        if finish == "abort":
            reason |= {"message": "Aborted", "status_code": None, "err_type": None}
        else:
            reason |= {"length": tokens} if finish == "length" else {"matched": ids[-1] if ids else None}
        meta = {
            "id": "@RID@",
            "finish_reason": reason,
            "prompt_tokens": "@PROMPT@",
            "weight_version": self.weight_version,
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(self._logprobs, ids, strict=False)
            ],
            "output_token_logprobs_length": tokens,
            "reasoning_tokens": 0,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "e2e_latency": 0.3,
            "response_sent_to_client_ts": 1795220741.89,
        }
        raw = orjson.dumps({"text": "x" * tokens, "output_ids": ids, "meta_info": meta})
        head, rest = raw.split(b"@RID@")
        middle, tail = rest.split(b'"@PROMPT@"')
        return head, middle, tail


class Generation:
    """One request under way."""

    __slots__ = ("budget", "connection", "prompt_tokens", "rid")

    def __init__(self, rid: bytes, connection: Connection, budget: int, prompt_tokens: int) -> None:
        self.rid = rid
        self.connection = connection
        self.budget = budget
        self.prompt_tokens = prompt_tokens


class Engine:
    """What is under way, and when it is due.

    Args:
        bodies: the answers.
        delay_s: time from arrival to answer; None: hold every generation until it is aborted.
        partial_tokens: ids in the answer of an aborted one.
        prompt_tokens: prompt length to report where a request has no ids to count.
    """

    def __init__(self, bodies: Bodies, *, delay_s: float | None, partial_tokens: int, prompt_tokens: int) -> None:
        self._bodies = bodies
        self._delay_s = delay_s
        self._partial_tokens = partial_tokens
        self._prompt_tokens = prompt_tokens
        self._loop = asyncio.get_running_loop()
        self._live: dict[bytes, Generation] = {}
        self._due: deque[tuple[float, Generation]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._held: deque[Generation] = deque()
        self._paused = False
        self._counts = {"served": 0, "aborted": 0, "max_running": 0}
        self.routes: dict[bytes, Callable[[Connection, bytes], None]] = {
            b"/generate": self._generate,
            b"/abort_request": self._abort,
            b"/pause_generation": self._pause,
            b"/continue_generation": self._continue,
            b"/update_weight_version": self._update,
            b"/update_weights_from_disk": self._update,
            b"/flush_cache": lambda connection, _: connection.answer(b"Cache flushed.\n"),
            b"/model_info": lambda connection, _: connection.json(
                {"model_path": "canned", "is_generation": True, "weight_version": self._bodies.weight_version}
            ),
            b"/server_info": self._server_info,
            b"/v1/loads": self._loads,
            b"/ping": lambda connection, _: connection.answer(b""),
            b"/health": lambda connection, _: connection.answer(b""),
        }

    def forget(self, rid: bytes, connection: Connection) -> None:
        """Drop what a client that left was waiting for."""
        generation = self._live.get(rid)
        if generation is not None and generation.connection is connection:
            del self._live[rid]

    def _generate(self, connection: Connection, body: bytes) -> None:
        found = _RID.search(body)
        rid = found[1] if found is not None else uuid.uuid4().hex.encode()
        if rid in self._live:
            connection.json(
                {"error": {"message": f"Duplicate request ID detected: {rid.decode()}"}}, b"400 Bad Request"
            )
            return
        allowed, prompt = _BUDGET.search(body), _PROMPT.search(body)
        budget = self._bodies.response_tokens if allowed is None else int(allowed[1])
        generation = Generation(
            rid, connection, budget, self._prompt_tokens if prompt is None else prompt[1].count(b",") + 1
        )
        self._live[rid] = generation
        connection.waiting_for = rid
        self._counts["max_running"] = max(self._counts["max_running"], len(self._live))
        if self._paused:
            self._held.append(generation)
        else:
            self._schedule(generation)

    def _schedule(self, generation: Generation) -> None:
        if self._delay_s is not None:
            due = self._loop.time() + self._delay_s
            self._due.append((due, generation))
            if self._timer is None:
                self._timer = self._loop.call_at(due, self._answer_due)

    def _answer_due(self) -> None:
        self._timer = None
        now = self._loop.time() + TICK_S
        due, live = self._due, self._live
        while due and due[0][0] <= now:
            _, generation = due.popleft()
            if live.get(generation.rid) is not generation:
                continue  # aborted, or its client left
            if self._paused:
                self._held.append(generation)
                continue
            tokens = min(generation.budget, self._bodies.response_tokens)
            self._answer(generation, tokens, "length" if tokens == generation.budget else "stop")
            self._counts["served"] += 1
        if due:
            self._timer = self._loop.call_at(due[0][0], self._answer_due)

    def _answer(self, generation: Generation, tokens: int, finish: str) -> None:
        del self._live[generation.rid]
        head, middle, tail = self._bodies.pieces(tokens, finish)
        prompt = b"%d" % generation.prompt_tokens
        length = len(head) + len(generation.rid) + len(middle) + len(prompt) + len(tail)
        generation.connection.waiting_for = None
        generation.connection.write(
            b"".join((_JSON_HEAD % length, head, generation.rid, middle, prompt, tail)),
        )

    def _end(self, generations: list[Generation]) -> None:
        for generation in generations:
            self._answer(generation, min(generation.budget, self._partial_tokens), "abort")
        self._counts["aborted"] += len(generations)

    def _abort(self, connection: Connection, body: bytes) -> None:
        wanted = orjson.loads(body)
        connection.answer(b"")
        if wanted.get("abort_all"):
            self._end(list(self._live.values()))
        else:
            generation = self._live.get(str(wanted.get("rid", "")).encode())
            self._end([] if generation is None else [generation])

    def _pause(self, connection: Connection, body: bytes) -> None:
        if orjson.loads(body).get("mode", "abort") == "abort":
            self._end(list(self._live.values()))
        self._paused = True
        connection.json({"message": "Generation paused successfully.", "status": "ok"})

    def _continue(self, connection: Connection, _: bytes) -> None:
        self._paused = False
        held, self._held = self._held, deque()
        for generation in held:
            if self._live.get(generation.rid) is generation:
                self._schedule(generation)
        connection.json({"message": "Generation continued successfully.", "status": "ok"})

    def _update(self, connection: Connection, body: bytes) -> None:
        wanted = orjson.loads(body)
        label = wanted.get("new_version", wanted.get("weight_version"))
        if label is not None:
            self._bodies.set_version(str(label))
        message = f"Weight version updated to {label}"
        connection.json({"success": True, "message": message, "new_version": label, "num_paused_requests": 0})

    def _server_info(self, connection: Connection, _: bytes) -> None:
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "max_running_requests": MAX_RUNNING}
        connection.json({"model_path": "canned", "version": "0.5.23", **sizes, "canned": self._counts})

    def _loads(self, connection: Connection, _: bytes) -> None:
        load = {"dp_rank": 0, "num_running_reqs": len(self._live), "num_waiting_reqs": 0}
        load["max_running_requests"] = MAX_RUNNING
        connection.json({"timestamp": "", "version": "0.5.23", "num_accelerators": 1, "loads": [load]})


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time; whatever has a `Content-Length`, and nothing chunked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.waiting_for: bytes | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and forget what was waited for."""
        del exc
        self._transport = None
        if self.waiting_for is not None:
            self._engine.forget(self.waiting_for, self)

    def data_received(self, data: bytes) -> None:
        """Answer every whole request that has arrived."""
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._buffer[:end]
            found = _LENGTH.search(head)
            whole = end + 4 + (0 if found is None else int(found[1]))
            if len(self._buffer) < whole:
                return
            body, self._buffer = self._buffer[end + 4 : whole], self._buffer[whole:]
            path = head.split(b" ", 2)[1].partition(b"?")[0]
            route = self._engine.routes.get(path)
            if route is None:
                self.json({"detail": "Not Found"}, b"404 Not Found")
            else:
                route(self, body)

    def write(self, answer: bytes) -> None:
        """Send bytes, if there is still someone to read them."""
        if self._transport is not None:
            self._transport.write(answer)

    def answer(self, text: bytes) -> None:
        """Send a 200 of plain text, or of nothing."""
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    def json(self, payload: Any, status: bytes = b"200 OK") -> None:
        """Send a JSON answer."""
        body = orjson.dumps(payload)
        head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self.write(head % (status, len(body)) + body)


async def _serve(args: argparse.Namespace) -> None:
    raise_open_files()
    loop = asyncio.get_running_loop()
    bodies = Bodies(args.response_tokens, args.vocab, args.weight_version)
    engine = Engine(
        bodies,
        delay_s=None if args.hold else args.delay,
        partial_tokens=args.partial_tokens,
        prompt_tokens=args.prompt_tokens,
    )
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", args.port, backlog=BACKLOG)
    gc.freeze()
    parent = os.getppid()
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    while os.getppid() == parent:  # noqa: ASYNC110 - a parent's death sends no event
        await asyncio.sleep(PARENT_POLL_S)


def main() -> None:
    """Run until ended, or until the parent ends."""
    parser = argparse.ArgumentParser(prog="bench.canned", description="An engine process that answers canned bodies.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.3, help="seconds from arrival to answer")
    parser.add_argument("--hold", action="store_true", help="hold every generation until it is aborted")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="reported where a request has no ids")
    parser.add_argument("--response-tokens", type=int, default=256)
    parser.add_argument("--partial-tokens", type=int, default=128, help="ids in the answer of an aborted request")
    parser.add_argument("--vocab", type=int, default=32000, help="ids are below this")
    parser.add_argument("--weight-version", default="default")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
