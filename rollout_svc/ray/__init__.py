"""The service as a named actor of a Ray cluster: `start` it, `connect` to it from any job, `stop` it.

    import rollout_svc.ray

    rollout = rollout_svc.ray.start("rollout.yaml", name="rollout")
    batch = ray.get(rollout.take_batch.remote(step=0, groups=64, timeout_s=600))
    ray.get(rollout.pause.remote(mode="abort", deadline_s=30))

Ray is imported when the first of them is called.
"""

from rollout_svc.ray.batch import TakenBatch
from rollout_svc.ray.handle import RolloutHandle
from rollout_svc.ray.starting import connect, start, stop

__all__ = ["RolloutHandle", "TakenBatch", "connect", "start", "stop"]
