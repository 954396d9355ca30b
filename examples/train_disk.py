"""A trainer whose weights go to the engines through a shared folder: the service has the engines load them."""

import my_trainer  # yours: train(groups), save_weights(step) -> path

from rollout_svc import SyncRolloutClient

stage = SyncRolloutClient("http://127.0.0.1:8700")
# The one place that knows how much to keep in flight is the trainer's config: hand it over at initialisation.
stage.set_concurrency(trainer={"train_batch_size": 4, "prompt_repeat_k": 4, "max_staleness": 1})

for step in range(my_trainer.STEPS):
    # Judged groups; the batch before is acknowledged with this call. The same step again gives the same batch.
    batch = stage.take_batch(step=step, groups=4, timeout_s=600)
    my_trainer.train(batch["groups"])  # prompt_ids, response_ids, logprobs, loss_mask, weight_versions, reward
    path = my_trainer.save_weights(step + 1)
    # Pause, load on every engine, resume. If an engine fails, this raises and the stage stays paused.
    stage.update_weights(version=step + 1, source={"kind": "disk", "path": path}, pause={"deadline_s": 30})

stage.close()
