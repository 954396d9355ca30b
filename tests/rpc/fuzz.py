"""The control API under schemathesis: whatever its own description allows, forbids or forgets, over real sockets.

- The service lives in a thread with a loop of its own, because the fuzzer blocks; it is a whole stage, so that at the
  end its ledger balances and nothing of it is left.
- Before each call the service is put back into the state it is fuzzed in, with an engine and prompts.
- A fuzzer has no patience and no wish for size: times that would be granted are cut, addresses lead to this machine,
  and plans stay small. What would be refused is sent as it was made.

`python -m tests.rpc.fuzz --seed 7 --examples 200` runs all states; `--state paused` one.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, get_args

import orjson
import schemathesis
from pydantic import BaseModel, ValidationError
from schemathesis import hooks
from schemathesis.config import ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.engine import Status, events, from_schema

from rollout_svc.config import WorkerConfig
from rollout_svc.errors import RolloutError
from rollout_svc.rpc import bodies
from rollout_svc.rpc.openapi import describe
from tests.rpc.api import TOKEN, api
from tests.support.fake_sglang import FakeSGLang, Reply
from tests.support.fake_sglang import Status as Answer
from tests.support.stage import Stage

__all__ = ["STATES", "Outcome", "State", "fuzz"]

State = Literal["running", "paused", "starting", "failed"]
STATES: Final[tuple[State, ...]] = get_args(State)
# Not among them: that whatever a schema allows is accepted. No schema knows which workers there are, or that there is
# no tokenizer; and to JSON Schema 1.0 is a whole number, to us it is not.
CHECKS: Final = [
    "status_code_conformance",  # among others: no 5xx that is not documented
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "ignored_auth",
    "unsupported_method",
    "allow_header_conformance",
]
START_S: Final = 30.0
"""Seconds for the thread to have started, and for its loop to answer: far more than either takes."""
PATIENCE_S: Final = 0.02
"""Seconds that a call may grant the service."""
SMALL: Final = {"train_batch_size": 8, "prompt_repeat_k": 2, "groups": 8, "max_batch": 8, "max_staleness": 4}
"""The largest of each that a call may ask for."""
COSTLY: Final[dict[str, type[BaseModel]]] = {
    "/v1/pause": bodies.Pause,
    "/v1/batches": bodies.Batch,
    "/v1/evaluations": bodies.Evaluation,
    "/v1/weights": bodies.Weights,
    "/v1/concurrency": bodies.Concurrency,
    "/v1/workers": bodies.Worker,
}
"""Calls whose bodies may ask for more than a fuzzer should wait for."""
FIRST_PORT: Final = 2
"""Engines that are added get this port of loopback or one of the next: nothing listens there."""


class Site(threading.Thread):
    """A service in a thread, kept in one state."""

    def __init__(self, state: State) -> None:
        super().__init__(name=f"site:{state}", daemon=True)
        self.kept = state
        self.url = ""
        self.failure: BaseException | None = None
        self._up, self._down = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stage: Stage | None = None
        self._engine: FakeSGLang | None = None
        self._prompts = 0

    def __enter__(self) -> Self:
        self.start()
        self._up.wait(START_S)
        if self.failure is not None:
            raise self.failure
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._down.set)
        self.join(START_S)
        if self.failure is not None:
            raise self.failure

    def run(self) -> None:
        """Serve until told to end."""
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            self.failure = error
        self._up.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        starting = self.kept == "starting"
        service = {"port": 0, "token": TOKEN}
        async with FakeSGLang(weight_version="0") as engine:
            engine.answer = lambda _: Reply(tokens=2)
            if starting:
                engine.script("/model_info", Answer(503), times=None)
            async with api(engine, ready=not starting, service=service, start_timeout_s=3600.0) as call:
                self._engine, self._stage, self.url = engine, call.stage, call.url
                if self.kept == "failed":
                    call.stage.may_die = True
                    call.stage.service._died("part", RuntimeError("it broke"), critical=True)
                self._up.set()
                await self._down.wait()

    def restore(self) -> None:
        """Put the service back into its state; called by the fuzzer's thread before each call."""
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(self._restore(), self._loop).result(START_S)

    async def _restore(self) -> None:
        assert self._stage is not None
        assert self._engine is not None
        service = self._stage.service
        try:
            if not any(worker["url"] == self._engine.url for worker in service.workers()):
                await service.add_worker(WorkerConfig(url=self._engine.url))
            if not service.status()["buffer"]["ready"]:
                self._prompts += await self._stage.push(1, first=self._prompts)
            if self.kept == "running" and service.state == "paused":
                await service.resume()
            if self.kept == "paused" and service.state == "running":
                await service.pause(deadline_s=1)
        except RolloutError:
            return  # it is in between; the next call finds it there


def _shrink(path: str, body: Any) -> None:
    """Keep a body that will be taken small and quick; one that will be refused stays as it is."""
    model = COSTLY.get(path)
    if model is None or not isinstance(body, dict):
        return
    try:
        model.model_validate(body)
    except ValidationError:
        return
    if path == "/v1/workers":
        body["url"] = f"http://127.0.0.1:{FIRST_PORT + len(body['url']) % 4}"
    if path in {"/v1/pause", "/v1/batches", "/v1/evaluations"}:
        key = "deadline_s" if path == "/v1/pause" else "timeout_s"
        body[key] = min(body.get(key) or PATIENCE_S, PATIENCE_S)
    if path == "/v1/weights" and body.get("pause"):
        _shrink("/v1/pause", body["pause"])
    for part in (body, body.get("trainer") or {}):
        for key in SMALL.keys() & part.keys():
            if part[key] is not None:
                part[key] = min(part[key], SMALL[key])


@contextmanager
def _hooked(site: Site) -> Iterator[None]:
    def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
        del context, kwargs
        site.restore()
        _shrink(case.path, case.body)

    schemathesis.hook(before_call)
    try:
        yield
    finally:
        hooks.unregister(before_call)


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        calls: how many were made.
        by_status: how many were answered how.
        findings: one each, with the call that shows it.
    """

    calls: int
    by_status: dict[int, int]
    findings: list[str]


def fuzz(
    state: State,
    *,
    seed: int,
    examples: int,
    phases: Sequence[str] = ("coverage", "fuzzing"),
    only: str | None = None,
) -> Outcome:
    """Run the fuzzer against a service that is kept in a state.

    Args:
        state: which.
        seed: the same seed makes the same calls.
        examples: random calls per operation.
        phases: `coverage` (edges of each schema), `fuzzing` (random), `stateful` (chains of calls).
        only: a path; None: all of them.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # a plan may raise it
    try:
        with Site(state) as site, _hooked(site):
            return _run(site, seed, examples, phases, only)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def _run(site: Site, seed: int, examples: int, phases: Sequence[str], only: str | None) -> Outcome:
    project = ProjectConfig(base_url=site.url, headers={"Authorization": f"Bearer {TOKEN}"}, request_timeout=START_S)
    project.generation.update(max_examples=examples, database="none", deterministic=False)
    project.phases.update(phases=list(phases))
    project.checks.update(included_check_names=CHECKS)
    config = SchemathesisConfig(seed=seed, projects=ProjectsConfig(default=project))
    schema: schemathesis.BaseSchema = schemathesis.openapi.from_dict(orjson.loads(describe(token=True)), config=config)
    schema = schema if only is None else schema.include(path=only)
    calls, by_status, findings = 0, dict[int, int](), dict[str, str]()
    for event in from_schema(schema).execute():
        if isinstance(event, (events.NonFatalError, events.FatalError)):
            findings[repr(event)] = repr(event)
        if not isinstance(event, events.ScenarioFinished):
            continue
        for made in event.recorder.interactions.values():
            calls += 1
            status = 0 if made.response is None else made.response.status_code
            by_status[status] = by_status.get(status, 0) + 1
        for checks in event.recorder.checks.values():
            for check in checks:
                if check.status is Status.FAILURE and check.failure_info is not None:
                    what = f"{event.recorder.label}: {check.name}: {check.failure_info.failure}"
                    findings.setdefault(what[:200], f"{what}\n{check.failure_info.code_sample}")
    return Outcome(calls, dict(sorted(by_status.items())), list(findings.values()))


def main() -> int:
    """Fuzz from the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description="Fuzz the control API.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--state", choices=STATES)
    parser.add_argument("--phases", default="coverage,fuzzing,stateful")
    given = parser.parse_args()
    found = 0
    for state in (given.state,) if given.state else STATES:
        started = time.monotonic()
        outcome = fuzz(state, seed=given.seed, examples=given.examples, phases=given.phases.split(","))
        found += len(outcome.findings)
        for finding in outcome.findings:
            sys.stdout.write(f"{finding}\n\n")
        told = f"{outcome.calls} calls in {time.monotonic() - started:.1f} s, answered {outcome.by_status}"
        sys.stdout.write(f"{state}: {told}; findings: {len(outcome.findings)}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
