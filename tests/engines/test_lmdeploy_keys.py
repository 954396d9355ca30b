"""A cluster that is not there: named at once, whoever asks."""

import subprocess
import sys

_SCRIPT = """
import asyncio, socket
from rollout_svc.engines.lmdeploy_keys import ExpertKeys
from rollout_svc.errors import SampleFailure

async def ask(scheme):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = ExpertKeys(f"{scheme}127.0.0.1:{port}")
    for _ in range(5):
        try:
            await keys.fetch("ab" * 28)
        except SampleFailure as failure:
            print(str(failure).replace(chr(10), " "))

for scheme in ("", "ray://"):
    asyncio.run(ask(scheme))
"""


def test_where_nobody_listens_a_key_is_missing() -> None:
    """Without a wait, and without a thread that is left behind; in a process that is not in a cluster already."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, timeout=50)
    lines = done.stdout.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("experts_missing") and "ConnectionRefusedError" in line for line in lines), lines
