"""A trainer that moves its weights to the engines itself (NCCL, IPC, its framework's own way)."""

import my_trainer  # yours: train(groups), push_weights(urls, step)

from rollout_svc import SyncRolloutClient

stage = SyncRolloutClient("http://127.0.0.1:8700")
stage.set_concurrency(trainer={"train_batch_size": 4, "prompt_repeat_k": 4, "max_staleness": 1})

for step in range(my_trainer.STEPS):
    batch = stage.take_batch(step=step, groups=4, timeout_s=600)
    my_trainer.train(batch["groups"])

    report = stage.pause(deadline_s=30)  # returns by the deadline, and says what it could not stop
    if not report["clean"]:
        print("left running:", report["abandoned"])  # those workers are in quarantine: no traffic, no weights
    urls = [worker["url"] for worker in stage.workers() if worker["state"] == "ACTIVE"]
    my_trainer.push_weights(urls, step + 1)
    # Nothing moves here: the pause is checked, the engines' version labels are set and read back, caches flushed.
    stage.update_weights(version=step + 1, source={"kind": "external"})
    stage.resume(ticket=report["ticket"])

stage.close()
