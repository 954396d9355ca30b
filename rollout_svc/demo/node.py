"""A Ray cluster of one node, for as long as this process lives: `python -m rollout_svc.demo.node FOLDER CPUS`.

Invariants:

- It says where the cluster is, in a line `node.ready url=ADDRESS`, once that takes drivers.
- Whatever ends this process ends the cluster: Ray's processes die with the one that started them.
"""

from __future__ import annotations

import signal
import sys
from typing import Any, Final, NoReturn

__all__ = ["main"]

_STORE_BYTES: Final = 128 * 2**20  # of the object store: batches are small here
_LOOPBACK: Final = "127.0.0.2"  # an address of Linux's own; Ray makes the machine's of 127.0.0.1


def main(folder: str, cpus: int) -> NoReturn:
    """Start the cluster, with its files in that folder, and keep it until SIGTERM."""
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
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # in place of Ray's own
        sys.stdout.write(f"node.ready url={context.address_info['address']}\n")
        sys.stdout.flush()
        while True:
            signal.pause()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
