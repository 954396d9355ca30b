"""A cluster that is not there: named at once, whoever asks."""

import socket

import pytest

from rollout_svc.engines.lmdeploy_keys import ExpertKeys
from rollout_svc.errors import SampleFailure


@pytest.mark.parametrize("scheme", ["", "ray://"])
async def test_where_nobody_listens_a_key_is_missing(scheme: str) -> None:
    """Without a wait, and without a thread that is left behind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = ExpertKeys(f"{scheme}127.0.0.1:{port}")
    for _ in range(5):
        with pytest.raises(SampleFailure, match=r"experts_missing.*ConnectionRefusedError"):
            await keys.fetch("ab" * 28)
