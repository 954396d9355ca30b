"""The stage of a run on a Ray cluster: the service an actor there, its engines launched by it, batches over Ray.

Invariants:

- Where no cluster is given, one of its own is started on this machine, and ends with the run: a child as any other.
- The service's actor is stopped before the connection ends; where it is not, it and its engines end with this driver.
- What Ray says goes to a log: what is on the terminal is the view's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from rollout_svc.demo.stage import ENGINES, START_TIMEOUT_S, Stage, engine_arguments
from rollout_svc.errors import Problem, RolloutError
from rollout_svc.tensors.ray_connection import AUTO, check_reachable, first_line, join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout_svc.demo.files import RunFiles
    from rollout_svc.demo.grpo import GrpoTrainer
    from rollout_svc.demo.live import View
    from rollout_svc.demo.options import DemoOptions
    from rollout_svc.demo.processes import Children
    from rollout_svc.ray import RolloutHandle

__all__ = ["ClusterFailed", "RayStage", "cluster_problems", "cluster_stage", "launched"]

ANSWER_S: Final = 30.0
"""For an answer to come over Ray, on top of what the call may take: it takes milliseconds."""
_OWN_CPUS: Final = ENGINES + 2  # what the node of its own says it has: each engine holds one


class ClusterFailed(RolloutError):
    """Raised when the cluster, or the service's actor on it, is gone or cannot be reached."""


class RayStage:
    """The calls of a `RolloutHandle`, each waited for under a bound."""

    def __init__(self, handle: RolloutHandle) -> None:
        self._handle = handle

    def __repr__(self) -> str:
        return f"<RayStage {self._handle!r}>"

    def take_batch(self, step: int, groups: int, timeout_s: float, *, tensors: bool = False) -> dict[str, Any]:
        """See `Stage.take_batch`."""
        how = {"tensors": True} if tensors else {}
        return _answer(self._handle.take_batch.remote(step, groups, timeout_s, **how), timeout_s)

    def pause(self, *, deadline_s: float) -> dict[str, Any]:
        """See `Stage.pause`."""
        return _answer(self._handle.pause.remote(deadline_s=deadline_s), deadline_s)

    def update_weights(self, version: int, source: Mapping[str, Any]) -> dict[str, Any]:
        """See `Stage.update_weights`."""
        return _answer(self._handle.update_weights.remote(version, dict(source)), START_TIMEOUT_S)

    def resume(self, ticket: int, *, weight_version: int) -> dict[str, Any]:
        """See `Stage.resume`."""
        return _answer(self._handle.resume.remote(ticket=ticket, weight_version=weight_version))

    def ack(self, batch_id: str) -> dict[str, Any]:
        """See `Stage.ack`."""
        return _answer(self._handle.ack.remote(batch_id))

    def status(self) -> dict[str, Any]:
        """See `Stage.status`."""
        return _answer(self._handle.status.remote())

    def memory(self) -> dict[str, Any]:
        """See `Stage.memory`."""
        return _answer(self._handle.memory.remote())


def cluster_problems(options: DemoOptions) -> list[Problem]:
    """Say why a run on a cluster cannot begin: found out in seconds, before anything is written."""
    if importlib.util.find_spec("ray") is None:
        return [Problem("--cluster", "Ray is not installed: pip install ray")]
    address = options.address
    if address is None:
        return []
    if address.startswith("ray://"):
        return [Problem("--address", f"{address} is of Ray's client: give the cluster's own, HOST:PORT")]
    if address != AUTO and not address.rpartition(":")[2].isdigit():
        return [Problem("--address", f"expected HOST:PORT, or {AUTO}, got {address}")]
    try:
        check_reachable(address)
    except ConnectionError as error:
        return [Problem("--address", str(error))]
    return []


@contextlib.contextmanager
def cluster_stage(
    options: DemoOptions, files: RunFiles, trainer: GrpoTrainer, children: Children, view: View
) -> Iterator[Stage]:
    """Join a cluster, or start one, and start the service there with its engines."""
    files.logs.mkdir(exist_ok=True)
    files.save_first_weights(trainer.model)
    files.write_config(options, [launched(options, files, index) for index in range(ENGINES)])
    with contextlib.ExitStack() as stack:
        address = options.address or stack.enter_context(_own_node(files, children, view))
        said = stack.enter_context((files.logs / "ray-driver.log").open("w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(_joined(address))
        name = f"demo-{secrets.token_hex(4)}"
        view.note(f"joined the cluster at {address}; starting the service as the actor {name}, and its engines")
        handle = stack.enter_context(_service(files, name))
        stage = RayStage(handle)
        for worker in stage.status()["workers"]:
            view.note(f"{worker['id']} listens at {worker['url']}")
        yield stage


def launched(options: DemoOptions, files: RunFiles, index: int) -> dict[str, Any]:
    """Make the settings of a worker that the service launches; it logs here where the cluster is here."""
    place = ["--host", "{host}", "--port", "{port}"]
    command = ["{python}", "-m", "rollout_svc", *engine_arguments(options, files, index), *place]
    launch: dict[str, Any] = {"command": command, "resources": {"CPU": 1}, "env": {"OMP_NUM_THREADS": "1"}}
    if options.address is None:
        launch["log_dir"] = str(files.logs.resolve())
    return {"launch": launch, "dialect": "sglang"}


@contextlib.contextmanager
def _own_node(files: RunFiles, children: Children, view: View) -> Iterator[str]:
    """Start a cluster of one node; gives its address. Its own logs are with the others once it has ended."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    own = token | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    with _environment(own):
        view.note(f"starting a Ray cluster on this machine, which takes some seconds; logs are in {files.logs}")
        logs = str((files.logs / "ray").resolve())
        node = children.start("node", "node", "rollout_svc.demo.node", [logs, str(_OWN_CPUS)])
        children.wait_ready([node], START_TIMEOUT_S, view.note)
        yield node.url


@contextlib.contextmanager
def _environment(laid_over: Mapping[str, str]) -> Iterator[None]:
    """Lay variables over this process's environment, for itself and for its children."""
    before = {name: os.environ.get(name) for name in laid_over}
    os.environ.update(laid_over)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    """Be a driver of the cluster for as long as the block lasts."""
    import ray  # noqa: PLC0415 - takes a second

    try:
        join(address)
    except ConnectionError as error:
        raise ClusterFailed(f"cannot join the cluster: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _service(files: RunFiles, name: str) -> Iterator[RolloutHandle]:
    """Start the service as an actor, and stop it at the end, if it still is there."""
    import rollout_svc.ray  # noqa: PLC0415 - as above

    try:
        handle = rollout_svc.ray.start(files.config, name)
    except RolloutError:
        raise
    except Exception as error:
        raise ClusterFailed(f"the service did not start: {first_line(error)}") from error
    try:
        yield handle
    finally:
        with contextlib.suppress(Exception):  # it is gone, or goes with this driver
            rollout_svc.ray.stop(handle)


def _answer(reference: Any, takes_s: float = 0.0) -> dict[str, Any]:
    """Wait for what a call returns; raises what it raised, or ClusterFailed."""
    import ray  # noqa: PLC0415 - as above

    try:
        answer: dict[str, Any] = ray.get(reference, timeout=takes_s + ANSWER_S)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RolloutError):
            raise cause from error
        raise ClusterFailed(f"the service does not answer: {type(error).__name__}: {first_line(error)}") from error
    return answer
