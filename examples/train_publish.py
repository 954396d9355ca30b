"""A trainer whose torch model goes to engines on its own machine as it is, and that sees it arrive."""

import my_trainer  # yours: model, train(groups)

from rollout_svc import Probe, SyncRolloutClient, SyncWeightPublisher

with SyncRolloutClient("http://127.0.0.1:8700") as stage, SyncWeightPublisher(stage) as publisher:
    stage.set_concurrency(trainer={"train_batch_size": 4, "prompt_repeat_k": 4, "max_staleness": 1})

    for step in range(my_trainer.STEPS):
        batch = stage.take_batch(step=step, groups=4, timeout_s=600)
        my_trainer.train(batch["groups"])
        # What the new weights say to a prompt: an engine that says something else gets no traffic.
        probe = Probe.of(my_trainer.model, [1, 2, 3], every=True)
        # Pause, hand over bucket by bucket, swap everywhere at once, ask, resume; a bar shows how far it is.
        publisher.publish(my_trainer.model.state_dict(), step + 1, pause={"deadline_s": 30}, probe=probe)
