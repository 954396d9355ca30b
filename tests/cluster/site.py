"""A service in an actor over engines that misbehave on command, each on a node of its own, and the hands on all of it.

- What is asked of the service goes through its handle; what is asked of an engine goes to its process, beside it.
- A test leaves the service as it found it: running, its engines well, every prompt it was given consumed.
"""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from tests.cluster.configs import lines, service
from tests.cluster.leftovers import until
from tests.cluster.nodes import HEAD, OTHERS
from tests.support.session_site import SESSION, TEMPLATE

__all__ = ["DEADLINE_S", "RAY_S", "SLACK_S", "Engine", "Site", "chaos", "config_of", "four", "started_site"]

DEADLINE_S: Final = 2.0
SLACK_S: Final = 0.1
"""By which a pause may exceed its deadline by its own clock, in seconds."""
RAY_S: Final = 0.2
"""What a call and its answer over Ray may add to that, in seconds, where two cores run a whole cluster."""
CALL_S: Final = 30.0
"""How long a call that is not about time may take, in seconds, before the test fails."""
GROUP_SIZE: Final = 2


def chaos(at: str | None = None, *arguments: str, **launch: Any) -> dict[str, Any]:
    """Make a worker: the misbehaving engine, on the node with that address where one is given."""
    command = ["{python}", "-m", "tests.support.chaos_engine", "--host", "{host}", "--port", "{port}"]
    held = {"CPU": 0.5} | ({} if at is None else {f"at-{at}": 0.1})
    return {"launch": {"command": [*command, *arguments], "resources": held, **launch}}


def config_of(ways: Path, *workers: dict[str, Any], groups: int = 32, **sections: Any) -> dict[str, Any]:
    """Make a configuration: task `t` of one turn, `tool` that parks, `clings` that does not leave, `chat` over HTTP."""
    plugins = "tests.cluster.plugins"
    judger = {"path": f"{plugins}:Judge", "ways": str(ways), "timeout_s": 60}
    agents = {
        "t": {"name": "single_turn"},
        "tool": {"path": f"{plugins}:ToolUser", "ways": str(ways)},
        "clings": {"path": f"{plugins}:Clinging", "ways": str(ways)},
        "chat": {"path": SESSION},
    }
    made = {
        "tasks": [
            {"name": name, "prompts": {"push": True}, "agent": agent, "judger": judger, "sampling": {"max_tokens": 256}}
            for name, agent in agents.items()
        ],
        "trainer": {"train_batch_size": groups, "prompt_repeat_k": GROUP_SIZE, "over_sample_threshold": 0.0},
        "pause": {"deadline_s": DEADLINE_S, "quarantine_s": 1.0, "abort_interval_s": 1.0},
        "cluster": {"kind": "ray", "strategy": "spread"},
        "tokenizer": {"path": "bytes", "chat_template": TEMPLATE},
        "sessions": {"hold_s": 0.5},
    }
    return service(*workers, **(made | sections))


class Engine:
    """One engine's process, at the address that the service has for it."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.worker_id: str = record["id"]
        self.url: str = record["url"]
        self.pid: int = record["process"]["pid"]
        self._frozen = False

    def __repr__(self) -> str:
        return f"<Engine {self.worker_id} {self.pid} at {self.url}>"

    @property
    def address(self) -> str:
        """Of its node."""
        return str(urlsplit(self.url).hostname)

    def command(self, **wanted: Any) -> int:
        """Set `fault` or `delay_s`; returns how many generations run."""
        return int(self._ask("POST", "/chaos", wanted)["running"])

    def running(self, least: int = 0, most: int = 1 << 30) -> int:
        """Wait until so many generations run there, by its own count."""
        return int(self._ask("GET", f"/chaos/running?least={least}&most={most}", None)["running"])

    def seen(self) -> dict[str, Any]:
        """What reached it: `prompts` by length, the moments of aborts, and whether it is frozen."""
        answer: dict[str, Any] = self._ask("GET", "/chaos/seen", None)
        return answer

    def kill(self) -> None:
        """End it as a crash does."""
        os.kill(self.pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it where it is; its kernel goes on taking connections and bytes."""
        os.kill(self.pid, signal.SIGSTOP)
        self._frozen = True

    def heal(self) -> None:
        """Let it go on, and answer at once."""
        if self._frozen:
            self._frozen = False
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)
        with suppress(OSError):
            self.command(fault="none", delay_s=0.0)

    def _ask(self, method: str, path: str, body: Any) -> Any:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=CALL_S)
        try:
            connection.request(method, path, None if body is None else orjson.dumps(body))
            return orjson.loads(connection.getresponse().read())
        finally:
            connection.close()


class Site:
    """The service, its engines, and the folder of the plugins' manners."""

    def __init__(self, rollout: Any, ways: Path) -> None:
        self.rollout = rollout
        self.ways = ways
        self.engines: list[Engine] = []
        self._given = 0
        self._taken = 0
        self._last: str | None = None

    # -- asking the service ----------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, timeout_s: float = CALL_S, **kwargs: Any) -> Any:
        """Call the service, and wait for its answer."""
        import ray

        return ray.get(getattr(self.rollout, name).remote(*args, **kwargs), timeout=timeout_s)

    def status(self) -> dict[str, Any]:
        """Ask how it stands."""
        record: dict[str, Any] = self.call("status")
        return record

    def pause(self, deadline_s: float = DEADLINE_S, **how: Any) -> dict[str, Any]:
        """Pause; see that it came back in time, by its own clock and by the caller's, with books that balance."""
        began = time.monotonic()
        report: dict[str, Any] = self.call("pause", deadline_s=deadline_s, **how)
        report["caller_s"] = time.monotonic() - began
        assert report["elapsed_s"] <= deadline_s + SLACK_S, report
        assert report["caller_s"] <= deadline_s + SLACK_S + RAY_S, report
        balanced(report["ledger"])
        for tally in report["workers"].values() if report["mode"] != "keep" else ():
            assert tally["in_flight"] == tally["answered"] + tally["cancelled"], report
        return report

    def resume(self, **how: Any) -> dict[str, Any]:
        """Go on."""
        record: dict[str, Any] = self.call("resume", **how)
        return record

    def put(self, count: int, task: str = "t") -> None:
        """Give it prompts that it never had before."""
        self.give(lines(count, self._given), task)

    def give(self, prompts: list[dict[str, Any]], task: str) -> None:
        """Give it these, which it never had before."""
        assert self.call("put_prompts", task, prompts) == {"accepted": len(prompts)}
        self._given += len(prompts)

    def take(self, groups: int, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Take a batch, all of it complete."""
        acked = [] if self._last is None else [self._last]  # of the same step: nobody else does it
        batch: dict[str, Any] = self.call("take_batch", 0, groups, timeout_s, acked, timeout_s=timeout_s + 5)
        self._taken += len(batch["groups"])
        self._last = batch["batch_id"]
        statuses = {sample["status"] for group in batch["groups"] for sample in group["samples"]}
        assert statuses == {"COMPLETED"}, statuses
        return batch

    def groups(self, *kinds: str) -> int:
        """Of the ledger."""
        return sum(self.status()["ledger"]["groups"][kind] for kind in kinds)

    def worker(self, index: int) -> dict[str, Any]:
        """How one worker stands."""
        record: dict[str, Any] = self.status()["workers"][index]
        return record

    def answers(self) -> bool:
        """Whether the service answers: not while its actor is gone."""
        import ray

        try:
            return bool(self.call("status", timeout_s=5.0)["state"] == "running")
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return False

    # -- asking the engines ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn where the engines are."""
        self.engines = [Engine(record) for record in self.status()["workers"] if record["process"]["pid"]]

    def hold(self) -> None:
        """Have every engine keep its answers until it is told otherwise."""
        for engine in self.engines:
            engine.command(fault="none", delay_s=None)

    def fill(self, count: int = 32) -> None:
        """Give prompts, and wait until all their generations run, some at every engine."""
        self.put(count)
        wanted = GROUP_SIZE * count
        until(lambda: sum(engine.running(least=1) for engine in self.engines) >= wanted, f"{wanted} generations run")

    # -- telling the plugins ---------------------------------------------------------------------------------

    def flag(self, *names: str) -> None:
        """Set how the plugins behave."""
        for name in names:
            (self.ways / name).touch()

    def unflag(self, *names: str) -> None:
        """Have them behave again."""
        for name in names:
            (self.ways / name).unlink(missing_ok=True)

    def said(self, kind: str) -> list[str]:
        """What the plugins said of themselves since the test began: sample ids, in order."""
        found = [path.name.rsplit("-", 1) for path in self.ways.glob(f"{kind}-*")]
        return [name.partition("-")[2] for name, _ in sorted(found, key=lambda pair: int(pair[1]))]

    # -- ending a test ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make all well again, and see that nothing was lost: every prompt that was given ends in a batch."""
        self.unflag("hold", "deaf", "tool")
        for engine in self.engines:
            engine.heal()
        if self.status()["state"] != "running":
            self.resume()
        until(lambda: self._states() == {"ACTIVE"}, "every worker is back", 60.0)
        self.look()
        for engine in self.engines:
            engine.heal()
        self.consume()
        for path in self.ways.iterdir():
            path.unlink()

    def consume(self) -> None:
        """Take and acknowledge all there is: every prompt that was given is consumed."""
        while self._taken < self._given:
            self.take(min(self._given - self._taken, 16))
        if self._last is not None:
            self.call("ack", self._last)
            self._last = None
        assert self.groups("consumed") == self._given

    def _states(self) -> set[str]:
        return {worker["state"] for worker in self.status()["workers"]}


def balanced(ledger: dict[str, Any]) -> None:
    """See that every account sums up to what was admitted."""
    for kind in ("groups", "samples"):
        account = ledger[kind]
        assert account["admitted"] == sum(n for name, n in account.items() if name != "admitted"), ledger


@contextmanager
def started_site(name: str, ways: Path, config: dict[str, Any], **options: Any) -> Iterator[Site]:
    """Start a service under a name of its own, on the head unless told; stopped at the end, whatever happened."""
    import rollout_svc.ray

    ways.mkdir(exist_ok=True)
    rollout = rollout_svc.ray.start(config, name=name, **({"resources": {f"at-{HEAD}": 0.1}} | options))
    site = Site(rollout, ways)
    try:
        site.look()
        yield site
    finally:
        for engine in site.engines:
            engine.heal()
        rollout_svc.ray.stop(rollout)


def four(**launch: Any) -> list[dict[str, Any]]:
    """Make four workers, one on each node."""
    return [chaos(address, **launch) for address in (HEAD, *OTHERS)]
