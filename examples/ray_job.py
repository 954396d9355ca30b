"""A trainer as a Ray job: it starts the service as an actor of its cluster, and takes its batches over Ray."""

import my_trainer  # yours: train(groups), save_weights(step) -> path, in a folder that all nodes share
import ray

import rollout_svc.ray

ray.init()  # the cluster that the job was submitted to
rollout = rollout_svc.ray.start("rollout.yaml", name="rollout")  # it is there, and so are its engines

for step in range(my_trainer.STEPS):
    # The batch before is acknowledged with this call. Another job finds it with rollout_svc.ray.connect("rollout").
    batch = ray.get(rollout.take_batch.remote(step=step, groups=4, timeout_s=600))
    my_trainer.train(batch["groups"])
    path = my_trainer.save_weights(step + 1)
    # Pause, load on every engine, resume. If an engine fails, this raises and the stage stays paused.
    source = {"kind": "disk", "path": path}
    ray.get(rollout.update_weights.remote(version=step + 1, source=source, pause={"deadline_s": 30}))

ray.get(rollout.ack.remote(batch["batch_id"]))
rollout_svc.ray.stop(rollout)  # what is not stopped ends with the job
