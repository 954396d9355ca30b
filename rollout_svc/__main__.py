"""`python -m rollout_svc`."""

from rollout_svc.cli import main

if __name__ == "__main__":
    main()
