"""A Ray cluster of one node, for as long as this process lives: `python -m rollout_svc.demo.node LOGS CPUS`.

Invariants:

- It says where the cluster is, in a line `node.ready url=ADDRESS`, once that takes drivers.
- Whatever ends this process ends the cluster: Ray's processes die with the one that started them.
- Ray's own files go with it, but for the logs, which are in LOGS then; only a kill leaves them where they were.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NoReturn

__all__ = ["main"]

_STORE_BYTES: Final = 128 * 2**20  # of the object store: batches are small here
_LOOPBACK: Final = "127.0.0.2"  # an address of Linux's own; Ray makes the machine's of 127.0.0.1


def main(logs: Path, cpus: int) -> NoReturn:
    """Start the cluster, and keep it until SIGTERM."""
    signal.signal(signal.SIGTERM, _end)
    # Sockets are in this folder, and the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="ray-demo-", ignore_cleanup_errors=True) as folder:
        try:
            _run(folder, cpus)
        finally:
            shutil.rmtree(logs, ignore_errors=True)
            with contextlib.suppress(OSError):
                shutil.copytree(Path(folder) / "session_latest" / "logs", logs)


def _run(folder: str, cpus: int) -> NoReturn:
    import ray  # noqa: PLC0415 - takes a second

    try:
        context: Any = ray.init(
            "local",
            num_cpus=cpus,
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=folder,
            _node_ip_address=_LOOPBACK if sys.platform == "linux" else None,
        )
        signal.signal(signal.SIGTERM, _end)  # in place of Ray's own
        sys.stdout.write(f"node.ready url={context.address_info['address']}\n")
        sys.stdout.flush()
        while True:
            signal.pause()
    finally:
        ray.shutdown()


def _end(_number: int, _frame: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
