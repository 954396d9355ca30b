"""A service is put together here: a configuration is prepared, then its parts are made, from the ground up."""

from rollout_svc.assembly.parts import Parts, assemble
from rollout_svc.assembly.prepared import Prepared, prepare, worker_ids
from rollout_svc.workers.making import make_worker

__all__ = ["Parts", "Prepared", "assemble", "make_worker", "prepare", "worker_ids"]
