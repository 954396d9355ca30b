"""The calls of a service on Ray: their errors, their order, who may make them, and its end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from rollout_svc.errors import BadRequest, ConfigError, Conflict, NotFound, NotNow, Unauthorized, Unreachable
from rollout_svc.rpc.blocking import SyncRolloutClient
from tests.cluster.configs import ON_HEAD, lines, service
from tests.cluster.fakes import fake_engine
from tests.cluster.nodes import Nodes

_ELSEWHERE = """
import sys, ray, rollout_svc.ray
from rollout_svc.errors import NotFound
ray.init(sys.argv[1], log_to_driver=False, configure_logging=False)
rollout = rollout_svc.ray.connect("calls")
assert ray.get(rollout.put_prompts.remote("t", [{"id": "other", "input_ids": [7]}]), timeout=30) == {"accepted": 1}

@ray.remote(num_cpus=0.1)
def state(handle):
    return ray.get(handle.status.remote(), timeout=30)["state"]

assert ray.get(state.remote(rollout), timeout=60) == "running"
try:
    rollout_svc.ray.connect("nobody")
except NotFound:
    print("told: all well")
"""
_TAKES = 80
"""Takes that wait at once."""
_BESIDE_S = 2.0
"""Seconds for a pause and a resume of an idle stage beside them: 0.01 on a machine that is not busy."""


def refused(config: dict[str, Any]) -> list[str]:
    """Start a service that cannot be; returns what is wrong where, and checks that nothing is left of it."""
    import rollout_svc.ray

    with pytest.raises(ConfigError) as told:
        rollout_svc.ray.start(config, name="refused", **ON_HEAD)
    with pytest.raises(NotFound):
        rollout_svc.ray.connect("refused")
    return [problem.path for problem in told.value.problems]


@pytest.mark.timeout(240)
def test_a_service_that_cannot_be_says_all_that_is_wrong(nodes: Nodes, tmp_path: Path) -> None:
    """P35: whoever starts it gets every problem, also what only the actor can find; nothing is half-started."""
    import rollout_svc.ray

    assert nodes.address
    assert refused(service(buffer={"lease_s": -1}, pause={"deadline_s": 0})) == ["pause.deadline_s", "buffer.lease_s"]
    assert refused(service(cluster=None)) == ["cluster"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert refused(service(service={"port": taken.getsockname()[1]})) == ["service.port"]
    held = service(buffer={"path": str(tmp_path / "journal")})
    rollout = rollout_svc.ray.start(held, name="held", **ON_HEAD)
    try:
        assert refused(held) == ["buffer.path"]
        with pytest.raises(Conflict, match="there is an actor 'held'"):
            rollout_svc.ray.start(held, name="held", **ON_HEAD)
    finally:
        rollout_svc.ray.stop(rollout)


@pytest.mark.timeout(240)
def test_of_several_starts_at_once_one_has_the_name(nodes: Nodes) -> None:
    """P35: the others get the conflict that a later one gets."""
    import rollout_svc.ray

    assert nodes.address

    def begun(_: int) -> Any:
        try:
            return rollout_svc.ray.start(service(), name="twin")
        except Conflict as error:
            return error.type

    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(begun, range(3)))
    handles = [one for one in made if one != "name_taken"]
    for handle in handles:
        rollout_svc.ray.stop(handle)
    assert len(handles) == 1


@pytest.mark.timeout(240)
def test_calls_over_ray_are_those_of_the_service(nodes: Nodes) -> None:
    """P8, P35: errors arrive as they are, control passes waiting takes, and any job may call, over HTTP as well."""
    import ray

    import rollout_svc.ray

    with fake_engine() as engine:
        config = service({"url": engine.url}, service={"port": 0, "host": "0.0.0.0", "token": "secret"})
        rollout = rollout_svc.ray.start(config, name="calls", **ON_HEAD, num_cpus=0.1)
        try:
            _check_errors(rollout)
            assert asyncio.run(_state(rollout)) == "running"
            _check_takes(rollout)
            _check_rest(rollout)
            ran = subprocess.run(
                [sys.executable, "-c", _ELSEWHERE, nodes.address],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert "told: all well" in ran.stdout, ran.stderr
            url = ray.get(rollout.ready.remote(), timeout=30)
            assert url.startswith("http://127.0.1."), "the address of the actor's node"
            with SyncRolloutClient(url, "secret") as client:
                assert client.ready()
                assert client.concurrency() == ray.get(rollout.concurrency.remote(), timeout=30)
            with SyncRolloutClient(url) as client, pytest.raises(Unauthorized):
                client.status()
        finally:
            rollout_svc.ray.stop(rollout)
        rollout_svc.ray.stop(rollout)
        with pytest.raises(NotFound):
            rollout_svc.ray.connect("calls")
        with SyncRolloutClient(url, "secret") as client, pytest.raises(Unreachable):
            client.status()


_TAKE: Final[dict[str, Any]] = {"step": 0, "groups": 1, "timeout_s": 0.1}
_EVALUATE: Final[dict[str, Any]] = {"task": "t", "timeout_s": 1.0}
_WRONG: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("take_batch", _TAKE | {"ack": "b0"}, "ack"),
    ("take_batch", _TAKE | {"ack": 5}, "ack"),
    ("checkpoint", {"path": "snapshot", "step": 0, "ack": "b0"}, "ack"),
    ("ack", {"batch_id": ["b0"]}, "batch_id"),
    ("put_prompts", {"task": "t", "prompts": None}, "prompts"),
    ("put_prompts", {"task": "t", "prompts": "abc"}, "prompts"),
    ("put_prompts", {"task": "t", "prompts": [5]}, "prompts.0"),
    ("evaluate", _EVALUATE | {"prompts": None}, "prompts"),
    ("evaluate", _EVALUATE | {"prompts": [None]}, "prompts.0"),
    ("update_weights", {"version": 1, "source": None}, "source"),
    ("remove_worker", {"worker_id": 5}, "worker_id"),
]
"""Arguments that no call can use: a BadRequest with the path, as over HTTP."""


def _check_errors(rollout: Any) -> None:
    import ray

    with pytest.raises(NotNow, match="groups are ready") as short:
        ray.get(rollout.take_batch.remote(step=0, groups=4, timeout_s=0.2), timeout=30)
    told: Any = short.value
    assert (told.type, told.detail["wanted"], told.retry_after_s) == ("not_enough", 4, 1.0)
    assert type(told.cause) is NotNow
    with pytest.raises(Conflict) as old:
        ray.get(rollout.pause.remote(if_ticket=77, deadline_s=2.0), timeout=30)
    assert "ticket" in str(old.value.detail)
    with pytest.raises(BadRequest) as wrong:
        ray.get(rollout.pause.remote(deadline_s=-1.0), timeout=30)
    assert [problem["path"] for problem in wrong.value.detail] == ["deadline_s"]
    with pytest.raises(BadRequest) as worker:
        ray.get(rollout.add_worker.remote(max_batch=0), timeout=30)
    assert "max_batch" in str(worker.value.detail)
    for name, given, path in _WRONG:
        with pytest.raises(BadRequest) as wrong:
            ray.get(getattr(rollout, name).remote(**given), timeout=30)
        assert wrong.value.detail[0]["path"] == path, (name, given)
    with pytest.raises(TypeError):
        rollout.pause.remote(deadline=1.0)
    with pytest.raises(TypeError):
        rollout.take_batch.remote(0)
    with pytest.raises(AttributeError, match="take_batch"):
        _ = rollout.take_batches


async def _state(rollout: Any) -> str:
    return str((await rollout.status.remote())["state"])


def _check_takes(rollout: Any) -> None:
    """Control calls pass takes that wait; a take that is cancelled is over."""
    import ray

    takes = [rollout.take_batch.remote(step=0, groups=4, timeout_s=60.0) for _ in range(_TAKES)]
    started = time.monotonic()
    report = ray.get(rollout.pause.remote(deadline_s=5.0), timeout=30)
    assert report["clean"]
    ray.get(rollout.resume.remote(report["ticket"]), timeout=30)
    assert time.monotonic() - started < _BESIDE_S
    assert not ray.wait(takes, num_returns=1, timeout=0)[0]
    for take in takes[1:]:
        ray.cancel(take)
    ray.get(rollout.put_prompts.remote("t", lines(8)), timeout=30)
    batch = ray.get(takes[0], timeout=30)
    assert rollout.unacked == (batch["batch_id"],)
    again = ray.get(rollout.take_batch.remote(step=0, groups=4), timeout=30)
    assert again == batch, "the same step again is the same batch"
    report = ray.get(rollout.take_batch.remote(step=1, groups=4), timeout=30)
    assert rollout.unacked == (report["batch_id"],)
    ledger = ray.get(rollout.status.remote(), timeout=30)["ledger"]["groups"]
    assert (ledger["consumed"], ledger["leased"]) == (4, 4)
    ray.get(rollout.ack.remote(report["batch_id"]), timeout=30)


def _check_rest(rollout: Any) -> None:
    """What trainers ask for less often."""
    import ray

    def ask(reference: Any) -> Any:
        return ray.get(reference, timeout=60)

    evaluated = ask(rollout.evaluate.remote("t", lines(2, first=50), sampling={"max_tokens": 4}, timeout_s=20.0))
    assert [sample["status"] for group in evaluated["groups"] for sample in group["samples"]] == ["COMPLETED"] * 2
    assert ask(rollout.stuck.remote(older_than_s=60.0))["samples"] == []
    assert ask(rollout.memory.remote())
    with pytest.raises(Conflict) as told:
        ask(rollout.checkpoint.remote("/nowhere/at-all", 1))
    assert told.value.type == "no_journal"
    updated = ask(rollout.update_weights.remote(1, {"kind": "external"}, pause={"deadline_s": 5.0}))
    assert updated["version"] == 1
    [worker] = ask(rollout.workers.remote())
    ask(rollout.set_concurrency.remote(limits={worker["id"]: 3}))
    assert ask(rollout.workers.remote())[0]["limit"] == 3
    ask(rollout.put_prompts.remote("t", lines(4, first=20)))
    batch = ask(rollout.take_batch.remote(step=1, groups=4, timeout_s=30.0, tensors=True))
    assert len(batch["tensors"]["rewards"]) == 8
    ask(rollout.ack.remote(batch["batch_id"]))
