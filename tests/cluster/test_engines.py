"""Engines in actors: where they are put, what ends with them, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.configs import engine, lines, service
from tests.cluster.nodes import HEAD, OTHERS, Nodes
from tests.cluster.watching import actors_alive, groups_alive, until
from tests.support.processes import lives, read_pids

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("nodes")]

OFFSPRING = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n{child.pid}\\n")
with open(sys.argv[1] + ".env", "w") as file:
    file.write("\\n".join(f"{name}={value}" for name, value in os.environ.items()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""An engine that has a child in a session of its own, as vLLM and LMDeploy have; both numbers go to a file."""

Start = Callable[..., Any]


def with_child(pids: Path, at: str | None = None, **launch: Any) -> dict[str, Any]:
    """Make a worker whose engine has a child."""
    worker = engine(at=at, **launch)
    command = worker["launch"]["command"]
    worker["launch"]["command"] = [command[0], "-c", OFFSPRING, str(pids), *command[1:]]
    return worker


def environment_of(pids: Path) -> dict[str, str]:
    """What the engine that wrote its number there was told."""
    return dict(line.split("=", 1) for line in Path(f"{pids}.env").read_text().splitlines() if "=" in line)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start services on the head, which end with the test, however it ends; nothing of them is left then."""
    import ray

    import rollout_svc.ray

    handles: list[Any] = []

    def begin(config: dict[str, Any], name: str) -> Any:
        where = {f"at-{HEAD}": 0.01}  # the service is on a node that stays
        handles.append(rollout_svc.ray.start(config, name=name, resources=where))
        return handles[-1]

    try:
        yield begin
    finally:
        for handle in handles:
            ray.kill(handle.actor)
        until(lambda: not groups_alive() and not actors_alive(), "the end of groups and actors")


def only(word: str) -> Any:
    """The one actor of that class or name."""
    [found] = [actor for actor in actors_alive() if word in (actor.class_name, actor.name)]
    return found


def first_worker(handle: Any) -> dict[str, Any]:
    """Ask for the record of the first worker."""
    import ray

    found: dict[str, Any] = ray.get(handle.status.remote(), timeout=30)["workers"][0]
    return found


def returned(handle: Any) -> bool:
    """Whether the first worker is in traffic; False while the actor is being restarted."""
    import ray

    try:
        return bool(first_worker(handle)["state"] == "ACTIVE")
    except ray.exceptions.ActorUnavailableError:
        return False


@pytest.mark.parametrize("how", ["host-killed", "host-dies", "service-dies", "service-killed"])
def test_what_an_engine_started_ends_with_it(start: Start, tmp_path: Path, how: str) -> None:
    """P19: whichever process ends, by Ray's hand or another's, no child in a session of its own is left.

    What is to go on does so: the engine of a lost host, and the service that Ray restarts, find their room free.
    """
    import ray

    pids = tmp_path / "pids"
    # Ray starts a service again only where it has a journal to go on from.
    handle = start(service(with_child(pids), buffer={"path": str(tmp_path / "journal.db")}), how)
    before = read_pids(pids, 2)
    groups = {group.placement_group_id for group in groups_alive()}
    assert len(groups) == 1
    host = only("EngineHost")
    if how == "host-killed":
        ray.kill(ray.get_actor(host.name, "rollout_svc"))
    elif how == "service-killed":
        ray.kill(handle.actor)
    else:
        os.kill(host.pid if how == "host-dies" else only(how).pid, signal.SIGKILL)
    until(lambda: not any(map(lives, before)), f"the end of {before}")
    if how == "service-killed":
        until(lambda: not groups_alive() and not actors_alive(), "the end of the group and its keeper")
        return
    assert all(map(lives, read_pids(pids, 4)[2:]))
    until(lambda: returned(handle), "its return")
    until(lambda: len(groups_alive()) == 1, "the end of the other group")
    assert (groups == {group.placement_group_id for group in groups_alive()}) == how.startswith("host")


def test_a_keeper_that_is_lost_costs_a_restart(start: Start, tmp_path: Path) -> None:
    """The groups end with it, and the engines; both are made anew."""
    pids = tmp_path / "pids"
    handle = start(service(with_child(pids)), "keeperless")
    os.kill(only("GroupKeeper").pid, signal.SIGKILL)
    read_pids(pids, 4)
    until(lambda: returned(handle), "its return")
    assert len(groups_alive()) == 1


def test_a_keeper_that_nobody_comes_to_ends() -> None:
    """A service that is killed as it makes one leaves nothing, also where no call of it ever arrived."""
    import ray

    from rollout_svc.launching.cluster.keeper import GroupKeeper

    keeper: Any = ray.remote(GroupKeeper)
    forgotten = keeper.options(name="forgotten", lifetime="detached", num_cpus=0).remote(connect_s=1.0)
    until(lambda: not any(actor.class_name == "GroupKeeper" for actor in actors_alive()), "its end")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(forgotten.listen.remote(), timeout=30)


@pytest.mark.parametrize("how", ["lost", "hung"])
def test_a_node_that_is_gone_is_left_for_another(start: Start, nodes: Nodes, tmp_path: Path, how: str) -> None:
    """P19: out of traffic at once, and back at another address, with the weights, as soon as Ray knows.

    Of a node that hung, and is ended, nothing is left either.
    """
    import ray

    kept, lost = nodes.add(spare=1.0), nodes.add(spare=1.0)
    resources = {"CPU": 0.5, "spare": 0.1}
    pids = tmp_path / "pids"
    config = service(with_child(pids, resources=resources), cluster={"kind": "ray", "strategy": "spread"})
    handle = start(config, f"moves-{how}")
    before = first_worker(handle)["url"]
    there, other = (lost, kept) if lost.node_ip_address in before else (kept, lost)
    ran = read_pids(pids, 2)
    stopped: list[int] = []
    try:
        if how == "lost":
            nodes.lose(there)
        else:
            stopped = [there.all_processes["raylet"][0].process.pid, only("EngineHost").pid, ran[0]]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
        out_s = until(lambda: first_worker(handle)["state"] != "ACTIVE", "it is out")
        back_s = until(lambda: returned(handle), "it is back", 90.0)
        assert other.node_ip_address in first_worker(handle)["url"]
        sys.stderr.write(f"{how}: out of traffic after {out_s:.1f} s, back after {out_s + back_s:.1f} s\n")
        assert ray.get(handle.put_prompts.remote("t", lines(4)), timeout=30) == {"accepted": 4}
        assert len(ray.get(handle.take_batch.remote(0, 4, 30), timeout=40)["groups"]) == 4
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        for node in (there, other) if how == "hung" else (other,):
            nodes.lose(node)
    until(lambda: not any(map(lives, ran)), f"the end of {ran}")


def test_an_engine_without_room_says_what_it_waits_for(start: Start) -> None:
    """Status names what is wanted and what the nodes have, within seconds; what was set aside is given back."""
    import ray

    handle = start(service(engine()), "crowded")
    added = ray.get(handle.add_worker.remote(engine(resources={"CPU": 3, "unheard-of": 1})), timeout=30)

    def reason() -> str:
        return str(ray.get(handle.workers.remote(), timeout=30)[1]["reason"])

    until(lambda: "none has CPU 3, unheard-of 1" in reason(), "the reason")
    assert "free: 127.0.1." in reason()
    ray.get(handle.remove_worker.remote(added["id"]), timeout=30)
    until(lambda: len(groups_alive()) == 1, "the end of its group")
    later = ray.get(handle.add_worker.remote(engine()), timeout=30)
    until(lambda: ray.get(handle.workers.remote(), timeout=30)[-1]["state"] == "ACTIVE", "the later one")
    assert len(groups_alive()) == 2
    ray.get(handle.remove_worker.remote(later["id"]), timeout=30)
    until(lambda: len(groups_alive()) == 1, "the end of its group")
    ray.get(handle.remove_worker.remote("w0"), timeout=30)
    until(lambda: not [actor for actor in actors_alive() if actor.class_name == "EngineHost"], "the end of the host")
    ray.get(handle.add_worker.remote(engine()), timeout=30)
    until(lambda: returned(handle), "the one that has its bundle")
    assert len(groups_alive()) == 1


def test_an_engine_is_told_its_devices_and_its_cluster(start: Start, nodes: Nodes, tmp_path: Path) -> None:
    """What Ray set aside reaches the process, and its log is where Ray's are, under the service's name."""
    node = nodes.add(gpus=2)
    pids = tmp_path / "pids"
    try:
        handle = start(service(with_child(pids, resources={"GPU": 1})), "devices")
        env = environment_of(pids)
        assert env["CUDA_VISIBLE_DEVICES"] in {"0", "1"}
        assert env["RAY_ADDRESS"] == nodes.address
        log = Path(first_worker(handle)["process"]["log"])
        assert (log.name, log.parent.name) == ("rollout-devices-w0.log", "logs")
        assert log.exists()
    finally:
        nodes.lose(node)


def test_an_engine_in_a_group_of_the_trainers(start: Start, tmp_path: Path) -> None:
    """It is on the first bundle of the list, told the list in its order, and leaves the group as it was."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    bundles = [{"CPU": 1.0, f"at-{address}": 0.1} for address in OTHERS]
    theirs = placement_group(bundles, "STRICT_SPREAD", name="trainer")
    pids = tmp_path / "pids"
    try:
        assert theirs.wait(20)
        worker = with_child(pids)
        worker["launch"]["placement"] = {"bundles": [2, 0], "tensor_parallel": 2, "group": "trainer", "device": "CPU"}
        del worker["launch"]["resources"]
        handle = start(service(worker), "guest")
        assert f"//{OTHERS[2]}:" in first_worker(handle)["url"]
        assert environment_of(pids)["LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES"] == "2,0"
        assert len(groups_alive()) == 1
        ray.kill(handle.actor)
        until(lambda: not any(map(lives, read_pids(pids, 2))), "the end of the engine")
        assert placement_group_table(theirs)["state"] == "CREATED"
    finally:
        remove_placement_group(theirs)


INSIDE = """
import os, runpy, sys
import ray
with open(sys.argv[1], "a") as file:
    file.write(ray.util.get_current_placement_group().id.hex() + " " + os.environ["LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES"])
print("served by", os.getpid())
sys.argv = sys.argv[4:]
runpy.run_module("rollout_svc", run_name="__main__", alter_sys=True)
"""


def test_an_engine_finds_itself_in_the_trainers_group(start: Start, tmp_path: Path) -> None:
    """One that makes workers on Ray asks Ray which group it is in: the trainer's; its words are in its log."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    theirs = placement_group([{"CPU": 1.0}], name="trainer")
    (tmp_path / "engine.py").write_text(INSIDE)
    try:
        assert theirs.wait(20)
        worker = engine()
        command = worker["launch"]["command"]
        worker["launch"]["command"] = ["{python}", str(tmp_path / "engine.py"), str(tmp_path / "told"), *command]
        worker["launch"]["placement"] = {"bundles": [0], "tensor_parallel": 1, "group": "trainer", "device": "CPU"}
        del worker["launch"]["resources"]
        handle = start(service(worker), "inside")
        assert (tmp_path / "told").read_text() == f"{theirs.id.hex()} 0"
        log = Path(first_worker(handle)["process"]["log"]).read_text()
        pid = int(log.partition("served by ")[2].split()[0])
        assert lives(pid)
        ray.kill(handle.actor)
        until(lambda: not lives(pid), "the end of the engine")
    finally:
        remove_placement_group(theirs)


DRIVER = """
import json, sys, time, ray, rollout_svc.ray
ray.init(address=sys.argv[1], log_to_driver=False)
rollout_svc.ray.start(json.loads(sys.argv[2]), name="driven")
print("ready", flush=True)
time.sleep(600)
"""
SERVE = """
import asyncio, json, sys
from rollout_svc.configfile import config_from_mapping
from rollout_svc.service import RolloutService
async def main():
    service = RolloutService(config_from_mapping(json.loads(sys.argv[2])))
    await service.start()
    await service.ready()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("code", [SERVE, DRIVER], ids=["serve", "driver"])
def test_nothing_is_left_of_a_process_that_is_killed(nodes: Nodes, tmp_path: Path, code: str) -> None:
    """Kill -9 of a service in a process of its own, or of the driver that has one in an actor, ends everything."""
    pids = tmp_path / "pids"
    config = json.dumps(service(with_child(pids), cluster={"kind": "ray", "address": nodes.address}))
    process = subprocess.Popen([sys.executable, "-c", code, nodes.address, config], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with process.stdout as said:
            while said.readline() != b"ready\n":
                assert process.poll() is None
            started = read_pids(pids, 2)
            assert len(groups_alive()) == 1
            process.kill()
            until(lambda: not any(map(lives, started)), f"the end of {started}")
            until(lambda: not groups_alive() and not actors_alive(), "the end of groups and actors")
    finally:
        process.kill()
        process.wait()
