"""Tensors too big to be copied about: who owns them, where they lie, how they travel, and when they go."""

from rollout_svc.tensors.handle import Handle, Handles, LiveHandle, Tally
from rollout_svc.tensors.store import MemoryStore, Store, Stored, make_store

__all__ = ["Handle", "Handles", "LiveHandle", "MemoryStore", "Store", "Stored", "Tally", "make_store"]
