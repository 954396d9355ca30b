"""Environments of `multi_turn`: somebody's object, called for one sample, and closed with it.

One whose `step` is async lives in the loop. Any other is called in a process that can be killed: between two calls it
is a pickle, so that no process has to wait for a model's turn, and any of them can go on with it.

Invariants:

- One object per run of a sample. Calls of it follow each other, and each has its time.
- Whatever it does is a typed SampleFailure: `environment_error`, with the file and line, or `environment_timeout`.
- It is closed when the loop ends, however it ends.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollout_svc import blame
from rollout_svc.agent import Work
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.judging import JudgerError
from rollout_svc.plugins import PluginSpec, check_options, construct, load_attr
from rollout_svc.real import as_real

__all__ = ["Environment", "Outcome", "SampleView", "check_environment", "is_async"]


@dataclass(frozen=True, slots=True)
class SampleView:
    """What an environment sees of its sample: values only."""

    sample_id: str
    group_id: str
    index: int
    task: str
    prompt: Any
    prompt_ids: list[int]
    ground_truth: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a step.

    Attributes:
        messages: what is said to the model next.
        done: the conversation is over.
        reward: of this step; None: none was told.
    """

    messages: list[Any]
    done: bool
    reward: float | None


def check_environment(spec: PluginSpec) -> None:
    """See that it can be made; raises ConfigError, its paths as the options of `multi_turn` have them."""
    try:
        found = load_attr(spec.target)
    except (Exception, SystemExit) as error:
        raise ConfigError.at("environment", f"cannot import {spec.target!r}: {blame.told(error)[0]}") from error
    if not inspect.isclass(found):
        raise ConfigError.at("environment", f"{spec.target!r} is no class: each sample has an environment of its own")
    missing = [method for method in ("reset", "step") if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError.at("environment", f"{spec.target!r} has no method {' and no '.join(missing)}")
    check_options(found, spec, "environment_options")


def is_async(spec: PluginSpec) -> bool:
    """Whether it lives in the loop."""
    return inspect.iscoroutinefunction(load_attr(spec.target).step)


class Environment:
    """One sample's environment, wherever it lives."""

    def __init__(self, spec: PluginSpec, work: Work, timeout_s: float, *, in_loop: bool) -> None:
        """Make it; nothing of it runs before `reset`.

        Args:
            spec: what to make.
            work: of the sample's run, which closes it.
            timeout_s: for each call.
            in_loop: it lives in the loop.
        """
        self._spec = spec
        self._timeout_s = timeout_s
        self._home: _InLoop | _InProcess = (_InLoop if in_loop else _InProcess)(spec, work, timeout_s)
        work.on_end(self._home.close)

    async def reset(self, view: SampleView) -> list[Any] | None:
        """Begin; returns what the conversation begins with, None for the prompt's own."""
        messages = await self._call("reset", view)
        return None if messages is None else self._messages(messages, "reset")

    async def step(self, said: Mapping[str, Any]) -> Outcome:
        """Answer what the model said."""
        answer = await self._call("step", said)
        if answer is None:
            return Outcome([], done=True, reward=None)
        if not isinstance(answer, Mapping):
            raise self._wrong("step", f"expected a mapping with messages, done and reward, not {answer!r:.200}")
        if unknown := set(answer) - {"messages", "done", "reward"}:
            raise self._wrong("step", f"unknown keys {sorted(map(str, unknown))}; there are messages, done, reward")
        messages = self._messages(answer.get("messages") or [], "step")
        done, reward = bool(answer.get("done", False)), answer.get("reward")
        number = None if reward is None else as_real(reward)
        if reward is not None and number is None:
            raise self._wrong("step", f"a reward is a finite number, not {reward!r:.200}")
        if not messages and not done:
            raise self._wrong("step", "no messages, and it is not done: the model has nothing to answer")
        return Outcome(messages, done, number)

    async def _call(self, method: str, argument: Any) -> Any:
        try:
            return await self._home.call(method, argument)
        except TimeoutError as error:  # one that was ended in a process says where it was
            message = f"{self._spec.target}.{method}: not done in {self._timeout_s:g} s {error}"
            raise SampleFailure("environment_timeout", message.strip()) from None
        except JudgerError as error:  # its process died, and where
            raise self._wrong(method, str(error)) from error
        except SampleFailure:
            raise
        except Exception as error:
            raise self._wrong(method, blame.told(error)[0]) from error

    def _messages(self, value: Any, method: str) -> list[Any]:
        if not isinstance(value, list | tuple) or not all(
            isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
        ):
            raise self._wrong(method, f"messages: expected a list of mappings with a role, not {value!r:.200}")
        return list(value)

    def _wrong(self, method: str, message: str) -> SampleFailure:
        return SampleFailure("environment_error", f"{self._spec.target}.{method}: {message}")


class _InLoop:
    """Lives in the loop, for the time of its sample."""

    def __init__(self, spec: PluginSpec, work: Work, timeout_s: float) -> None:
        self._spec, self._work, self._timeout_s = spec, work, timeout_s
        self._made: Any = None

    async def call(self, method: str, argument: Any) -> Any:
        if self._made is None:
            self._made = load_attr(self._spec.target)(**self._spec.options)
        result = _exitless(getattr(self._made, method), argument)
        return await self._work.bounded(result, self._timeout_s) if inspect.isawaitable(result) else result

    async def close(self) -> None:
        close = getattr(self._made, "close", None)
        if close is not None:
            result = _exitless(close)
            if inspect.isawaitable(result):
                await result  # the clean-up has its own time


def _exitless(function: Any, *arguments: Any) -> Any:
    with blame.contained():
        return function(*arguments)


class _InProcess:
    """Lives in a pickle between two calls, each in any process of the pool."""

    def __init__(self, spec: PluginSpec, work: Work, timeout_s: float) -> None:
        self._spec, self._work, self._timeout_s = spec, work, timeout_s
        self._state: bytes | None = None

    async def call(self, method: str, argument: Any) -> Any:
        return await self._run(method, argument)

    async def close(self) -> None:
        if self._state is not None and hasattr(load_attr(self._spec.target), "close"):
            await self._run("close")

    async def _run(self, method: str, *arguments: Any) -> Any:
        sent = (self._spec, self._state, method, arguments)
        kept = await self._work.call(_HERE, "__call__", sent, self._timeout_s)
        if kept.problem is not None:
            raise SampleFailure("environment_error", f"{self._spec.target}.{method}: {kept.problem}")
        self._state = kept.state
        return kept.result


@dataclass(frozen=True, slots=True)
class _Kept:
    """What comes back from the process: the environment, and its answer; or what went wrong."""

    state: bytes | None = None
    result: Any = None
    problem: str | None = None


def in_process(sent: tuple[PluginSpec, bytes | None, str, tuple[Any, ...]]) -> _Kept:
    """Make the environment, or go on with it, and call it."""
    spec, state, method, arguments = sent
    try:
        made = construct(spec, "environment") if state is None else pickle.loads(state)  # noqa: S301 - our own bytes
        result = getattr(made, method)(*arguments)
    except BaseException as error:  # noqa: BLE001 - somebody's code, which may exit
        return _Kept(problem=blame.told(error)[0])
    try:
        return _Kept(pickle.dumps(made), result)
    except Exception as error:  # noqa: BLE001 - an object of theirs
        said = f"{type(error).__name__}: {error}"
        return _Kept(problem=f"between its calls it is a pickle, and it cannot be ({said}): an async one need not be")


_HERE: Final = PluginSpec("rollout_agents.environments:in_process", {})
