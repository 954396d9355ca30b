"""What shards a configuration makes, for people who have not started it yet: pure.

Invariant: what is said here is what `split` will do; settings that it refuses are refused here, with the same error.
"""

from __future__ import annotations

from typing import Any

from rollout_svc.config import Config
from rollout_svc.plan import Plan
from rollout_svc.sharding.naming import joined
from rollout_svc.sharding.split import split

__all__ = ["shard_outlook"]


def shard_outlook(config: Config, plan: Plan) -> list[dict[str, Any]]:
    """Say what each shard will have; nothing where there is one loop.

    Args:
        config: the settings of the whole.
        plan: of the whole.

    Returns:
        For each shard `id`; `workers`, by the name each will have, the one it has in the configuration; `groups` of a
        batch; `limit`, the requests that its engines run at once; and the file of its `journal`.

    Raises:
        ConfigError: at `producer.shards`: the settings cannot be divided so.
    """
    if config.producer.shards == 1:
        return []
    return [
        {
            "id": part.shard_id,
            "workers": {joined(part.shard_id, f"w{number}"): f"w{place}" for number, place in enumerate(part.workers)},
            "groups": part.config.trainer.train_batch_size,
            "limit": sum(plan.limit_of(f"w{place}") for place in part.workers),
            "journal": part.config.buffer.path,
        }
        for part in split(config)
    ]
