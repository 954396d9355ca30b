"""The watch on memory and disk: what each process has, what grows with the steps, and what is to blame."""

from rollout_svc.observe.memory.watch import Growth, MemoryWatch, News

__all__ = ["Growth", "MemoryWatch", "News"]
