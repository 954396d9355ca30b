"""The journal: the replay buffer in a SQLite file, from which the next life goes on."""

from rollout_svc.buffer.journal.journal import Journal

__all__ = ["Journal"]
