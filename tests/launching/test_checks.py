"""What is found wrong with a launch before anything is started."""

from __future__ import annotations

import pytest

from rollout_svc.config import LaunchConfig
from rollout_svc.launching.checks import address_problems


@pytest.mark.parametrize("host", ["engine..example", "x" * 64])
def test_a_host_that_cannot_be_a_name_is_named(host: str) -> None:
    """What the system does not even look up is a problem like any other, at its path."""  # P35
    [problem] = address_problems(LaunchConfig(command=("engine", "{port}"), host=host), "workers.0.launch")
    assert problem.path == "workers.0.launch.host"
    assert "is no address" in problem.message
