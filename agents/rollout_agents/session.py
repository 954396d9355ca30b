"""`session`: an agent that was not written for us, and speaks OpenAI's or Anthropic's API to a session of its own.

| option | the agent is |
|---|---|
| `call` | `module:attr`, called with those of `base_url`, `api_key`, `prompt`, `sample_id` that it takes |
| `command` | a command line; where its session is, and `ROLLOUT_PROMPT`, are in its environment |
| neither | somebody else's, who takes the session by `POST /sessions` and ends it by `POST /sessions/{id}/end` |

A synchronous callable runs in a process of its own, as a command does.

Invariants:

- A process and all it started end with the sample, and with the service, however that ends.
- An agent that fails fails its sample, with its own last words; one that takes longer than `timeout_s` does too.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import orjson

from rollout_agents.session_call import GIVEN, bound
from rollout_svc.agent import AgentContext, OnPause
from rollout_svc.errors import SampleFailure
from rollout_svc.launching import Launch, LaunchFailed, ProcessLauncher, how_it_ended
from rollout_svc.plugins import load_attr
from rollout_svc.sample import Sample
from rollout_svc.sessions.registry import Sessions
from rollout_svc.sessions.session import Session

__all__ = ["SessionAgent"]

_AGENT_S: Final = 1200.0
"""Seconds an agent may take where nothing else is said: as a request to an engine."""
_END_S: Final = 2.0  # seconds a process has to stop when its sample ends; half of it is kept for the kill
_LAST_CHARS: Final = 2000  # of what a process said, in the failure of its sample


class SessionAgent:
    """Runs an agent, or waits for one; its turns come over HTTP."""

    on_pause: OnPause = "park"
    needs_http = True

    def __init__(
        self,
        call: str | None = None,
        command: Sequence[str] | None = None,
        timeout_s: float = _AGENT_S,
        max_turns: int | None = None,
    ) -> None:
        """Check the options.

        Args:
            call: `module:attr`.
            command: a program and its arguments.
            timeout_s: seconds it may take, pauses left out.
            max_turns: that a session may have.

        Raises:
            ValueError: an option means nothing; imports fail as they do.
        """
        if call is not None and command is not None:
            raise ValueError("give call or command, not both")
        if not timeout_s > 0 or (max_turns is not None and max_turns < 1):
            raise ValueError("timeout_s and max_turns have to be positive")
        self._call = None if call is None else load_attr(call)
        if self._call is not None:
            bound(self._call, {})
            if not _is_async(self._call):
                command = [sys.executable, "-m", "rollout_agents.session_call", str(call)]
        elif command is not None and (not command or shutil.which(command[0]) is None):
            raise ValueError(f"command: no program {command[0] if command else ''!r} is found")
        self._command = None if command is None else tuple(command)
        self._path = os.pathsep.join(filter(None, sys.path)) if call is not None else None
        self.takes_outsiders = command is None and call is None
        self._timeout_s = timeout_s
        self._max_turns = max_turns

    async def run(self, sample: Sample, ctx: AgentContext) -> Sample:
        """Open a session and see its agent to the end."""
        sessions = ctx.sessions
        if sessions is None:
            raise SampleFailure("agent_error", "there are no sessions here")
        session = await sessions.open(sample, ctx, timeout_s=self._timeout_s, max_turns=self._max_turns)
        try:
            if self._command is not None:
                await self._run_command(self._command, session, sessions, ctx)
            elif self._call is not None:
                await self._run_call(self._call, session, sessions, ctx)
            else:
                sessions.offer(session)
                await asyncio.wait({session.ended})
        finally:
            await sessions.close(session)
        if session.failure is not None:
            raise session.failure
        return sample

    @staticmethod
    async def _run_call(call: Any, session: Session, sessions: Sessions, ctx: AgentContext) -> None:
        """Run an asynchronous callable until it returns, or its session ends."""
        given = {key: value for key, value in sessions.describe(session).items() if key in GIVEN}
        work = ctx.work.start("agent", call(**bound(call, given)))
        await asyncio.wait({work, session.ended}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return
        if work.cancelled():
            raise SampleFailure("agent_error", "the agent cancelled itself")
        error = work.exception()
        if error is not None and not session.ended.done():
            raise SampleFailure("agent_error", _told(error)) from error

    async def _run_command(
        self, command: tuple[str, ...], session: Session, sessions: Sessions, ctx: AgentContext
    ) -> None:
        """Run a process until it ends, or its session does."""
        log = Path(await asyncio.to_thread(_new_log))
        launcher = ProcessLauncher()

        async def end() -> None:
            await launcher.close(asyncio.get_running_loop().time() + _END_S)
            await asyncio.to_thread(log.unlink, missing_ok=True)

        ctx.work.on_end(end)
        try:
            process = await launcher.start(Launch(command, self._environment(session, sessions), log))
        except LaunchFailed as error:
            raise SampleFailure("agent_error", str(error)) from error
        ends: set[asyncio.Future[Any]] = {process.gone, session.ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not process.gone.done() or session.ended.done():
            return
        if (code := process.gone.result()) != 0:
            # The last line says most, and what is shown of a long message is its beginning.
            before, _, last = (await process.last_words())[-_LAST_CHARS:].rpartition("\n")
            said = f"{last}\nbefore that: {before}" if before else last or "it said nothing"
            raise SampleFailure("agent_error", f"it {how_it_ended(code)}: {said}")

    def _environment(self, session: Session, sessions: Sessions) -> dict[str, str]:
        told = sessions.describe(session)
        given = {
            "OPENAI_BASE_URL": told["base_url"],
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": sessions.base_url(session),
            "ANTHROPIC_API_KEY": session.key,
            "ROLLOUT_PROMPT": orjson.dumps(told["prompt"]).decode(),
            "ROLLOUT_SAMPLE_ID": session.sample.sample_id,
        }
        return given if self._path is None else given | {"PYTHONPATH": self._path}


def _is_async(call: Any) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004


def _new_log() -> str:
    descriptor, name = tempfile.mkstemp(prefix="rollout-agent-", suffix=".log")
    os.close(descriptor)
    return name


def _told(error: BaseException) -> str:
    """Say an agent's error in one line, with where in its code it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
