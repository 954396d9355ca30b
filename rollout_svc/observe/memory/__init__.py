"""The watch on memory and disk: what each process has, what grows with the steps, and what is to blame."""

from rollout_svc.observe.memory.probe import Probe
from rollout_svc.observe.memory.sampler import MemorySampler
from rollout_svc.observe.memory.system import describe_system
from rollout_svc.observe.memory.watch import Growth, MemoryWatch, News

__all__ = ["Growth", "MemorySampler", "MemoryWatch", "News", "Probe", "describe_system"]
