"""A look at a cluster, from a process that is connected to it."""

from __future__ import annotations

import asyncio

import pytest

from rollout_svc.config import Config
from rollout_svc.launching.cluster.survey import survey


@pytest.mark.timeout(120)
def test_a_look_ends_no_connection_of_others(ray_cluster: str) -> None:
    """Whoever was connected before still is."""
    import ray

    sections = {"tasks": [{"name": "t", "prompts": {"push": True}}], "cluster": {"address": ray_cluster}}
    found = asyncio.run(survey(Config.model_validate(sections)))
    assert found is not None
    assert found.record["failure"] is None
    assert ray.is_initialized()
