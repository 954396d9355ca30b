"""The whole loop on one machine: a small GRPO trainer against the real service."""

from rollout_svc.demo.options import DemoOptions
from rollout_svc.demo.run import run_demo

__all__ = ["DemoOptions", "run_demo"]
