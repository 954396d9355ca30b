"""What to look at first, by the account that grows; `docs/memory.md` has the long answers."""

from __future__ import annotations

from typing import Final

__all__ = ["advice_on"]

_ADVICE: Final = {
    "rss": "another process: ask it, or whoever runs it",
    "unaccounted": "in none of the accounts: a library's own allocator, threads' stacks, mapped files",
    "python_heap": "objects, arrays or tensors in none of our accounts: a plugin's list or cache, what a log keeps",
    "malloc_free": "freed and not given back: fragments; try MALLOC_ARENA_MAX=2, or jemalloc",
    "torch_cpu": "tensors that somebody keeps: offloaded weights or optimizer states, a list of losses",
    "torch_cuda": "tensors that somebody keeps on a device",
    "shared_memory": "segments that nobody unlinks",
    "ray_store": "references that nobody drops; one that was pickled out of band never is",
    "ray_spilled": "the object store is full, and what is in it stays referenced",
    "fetch_buffers": "a role that is not drained at the end of a step",
    "replay_buffer": "groups wait longer, or are longer: batches are not acknowledged, or the trainer is behind",
    "in_flight": "requests become more, or longer",
    "journal_disk": "the disk keeps more each step: see journal.keep_steps, and what is pushed but not consumed",
    "trajectories_disk": "every finished group is written down: trajectories.max_files bounds it",
    "open_files": "a file that this process writes to and nobody cuts",
}
_HANDLES: Final = "tensors that were not released: memory.debug names the holder of each"


def advice_on(account: str) -> str:
    """One line for people."""
    return _HANDLES if account.startswith("handles.") else _ADVICE.get(account, "see docs/memory.md")
