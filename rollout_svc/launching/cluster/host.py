"""The actor that has one engine's process on its leash, on whichever node it was placed.

Invariants:

- The process ends when the actor does, however it does: the other end of its leash is the actor's, and the leash lives
  through the end that Ray gives to an actor's children.
- It lives as long as its owner, the service, whose death ends it without a word.
- Once it was held on to, it ends when it is let go of (`holding.py`), also while its node is out of the cluster: the
  engine of a seat that was given up does not run beside the one that took its place.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollout_svc.launching.cluster.holding import Door, Held
from rollout_svc.launching.launch import Launch, LaunchFailed
from rollout_svc.launching.ports import AUTO_PORTS
from rollout_svc.launching.processes import LeashedProcess, ProcessLauncher

__all__ = ["EngineHost", "Place"]

_END_S: Final = 10.0  # seconds for a process that was killed to be gone
_LAST_S: Final = 2.0  # seconds for Ray to end the actor
_PORTS: Final = 64  # free ones that a host names: one engine at a time takes one


@dataclass(frozen=True, slots=True)
class Place:
    """A node, as its host sees it.

    Attributes:
        address: of the node.
        node_id: Ray's, in hexadecimal.
        python: the interpreter there.
        logs: folder of Ray's own logs there.
        ports: some that nobody listens at.
        cluster: address of the cluster, for an engine that joins it.
    """

    address: str
    node_id: str
    python: str
    logs: str
    ports: tuple[int, ...]
    cluster: str


class EngineHost:
    """Starts an engine's process on its node, and watches it; all calls are made in the actor's loop."""

    def __init__(self) -> None:
        self._launcher = ProcessLauncher(apart=True)
        self._process: LeashedProcess | None = None
        self._held = Held()
        self._ending: asyncio.Task[None] | None = None

    async def listen(self) -> Door:
        """Listen for the one who holds on, at a port that engines have as well: the service reaches those."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end_when_left(), name="left")
        address = _address()
        return await self._held.listen(address, self._free(address))

    async def _end_when_left(self) -> None:
        await self._held.left.wait()
        if self._process is not None:
            self._process.kill()
            await asyncio.wait({self._process.ended}, timeout=_END_S)
        await asyncio.sleep(_LAST_S)  # Ray ends it as well, where it can, and takes an end of its own for a crash
        os._exit(0)  # what may be left has a leash, which ends it now

    def _free(self, address: str) -> tuple[int, ...]:
        """Ports that nobody listens at."""
        ports = random.sample(AUTO_PORTS, 4 * _PORTS)
        return tuple([port for port in ports if self._launcher.is_free(address, port)][:_PORTS])

    async def where(self) -> Place:
        """Say where this is; asked again at each start, for ports come and go."""
        import ray  # noqa: PLC0415 - a second to import, for those who have a cluster

        context = ray.get_runtime_context()
        address = _address()
        node: Any = ray._private.worker._global_node  # noqa: SLF001 - the folder of its logs is told nowhere else
        logs = Path(node.get_logs_dir_path())
        free, node_id = self._free(address), context.get_node_id()
        return Place(address, node_id, sys.executable, str(logs), free, context.gcs_address)

    async def start(self, launch: Launch) -> tuple[int, int]:
        """Start the process; returns its number and its leash's. Raises LaunchFailed."""
        if self._process is not None and not self._process.ended.done():
            raise LaunchFailed(f"the process {self._process.pid} has not ended yet")
        self._process = await self._launcher.start(launch)
        return self._process.pid, self._process.leash_pid

    async def outlive(self, leash_pid: int, timeout_s: float) -> None:
        """Wait until a leash of an actor that was here before has ended, and all it held with it."""
        try:
            watched = os.pidfd_open(leash_pid)
        except (OSError, AttributeError):  # it has ended, or nobody can tell
            return
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(watched, over.set)
        try:
            async with asyncio.timeout(timeout_s):
                await over.wait()
        except TimeoutError:
            return
        finally:
            loop.remove_reader(watched)
            os.close(watched)

    async def gone(self) -> int | None:
        """Wait for the end of the process; returns how it ended."""
        return None if self._process is None else await asyncio.shield(self._process.gone)

    async def ended(self) -> int | None:
        """Wait until nothing of it is left; returns how it ended."""
        return None if self._process is None else await asyncio.shield(self._process.ended)

    async def ask(self) -> None:
        """Ask the process to stop."""
        if self._process is not None:
            self._process.ask()

    async def kill(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()

    async def last_words(self) -> str:
        """The last lines of its log."""
        return "" if self._process is None else await self._process.last_words()

    async def close(self, grace_s: float) -> None:
        """Ask the process to stop, and end it after that long."""
        await self._launcher.close(asyncio.get_running_loop().time() + grace_s)


def _address() -> str:
    """Of this node."""
    import ray  # noqa: PLC0415 - as above

    util: Any = ray.util
    address: str = util.get_node_ip_address()
    return address
