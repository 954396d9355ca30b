"""Run the built-in engine: `python -m rollout_svc.embedded`."""

import sys

from rollout_svc.embedded.run import main

if __name__ == "__main__":
    sys.exit(main())
