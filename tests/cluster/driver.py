"""A driver of its own: starts a service from the configuration on its input, says so, and waits to be killed."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from tests.cluster.configs import ON_HEAD

_WAIT_S = 300.0  # seconds after which it ends by itself


def main() -> None:
    """Start the service that is named in the first argument; the second is a file to make when it is there."""
    import ray

    import rollout_svc.ray

    ray.init(log_to_driver=False, configure_logging=False)
    rollout = rollout_svc.ray.start(json.load(sys.stdin), name=sys.argv[1], **ON_HEAD)
    Path(sys.argv[2]).write_text(repr(rollout))
    threading.Event().wait(_WAIT_S)


if __name__ == "__main__":
    main()
