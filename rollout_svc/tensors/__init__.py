"""Tensors too big to be copied about: who owns them, where they lie, how they travel, and when they go."""

from rollout_svc.tensors.handle import Handle, Handles, LiveHandle, Tally
from rollout_svc.tensors.loan import Loan, ReadHandle
from rollout_svc.tensors.store import MemoryStore, Store, Stored, make_store
from rollout_svc.tensors.threads import Threads, WorkThreads

__all__ = [
    "Handle",
    "Handles",
    "LiveHandle",
    "Loan",
    "MemoryStore",
    "ReadHandle",
    "Store",
    "Stored",
    "Tally",
    "Threads",
    "WorkThreads",
    "make_store",
]
