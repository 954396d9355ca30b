"""`experts.ray_address` that leads nowhere: one line, in time."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

_CONNECT = """
import sys
from rollout_svc.tensors.ray_store import RayStore
try:
    RayStore(sys.argv[1], timeout_s=2.0)
except OSError as error:
    print(f"refused: {error}")
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """An address where somebody listens who is no cluster, and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _refusal(address: str) -> str:
    """What a process of its own is told that connects there, and ends by itself."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CONNECT, address], capture_output=True, text=True, timeout=60, check=True
    )
    assert time.monotonic() - began < 45
    (line,) = done.stdout.splitlines()
    return line


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:9", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused_in_one_line(address: str) -> None:
    """Ray goes on trying for ever where nobody listens, and raises a ValueError where it cannot read the address."""
    assert _refusal(address).startswith("refused: ")


def test_a_cluster_that_never_answers_is_given_up(silent: str) -> None:
    """The process ends although Ray is still trying."""
    assert _refusal(silent) == f"refused: no Ray cluster at {silent} answered within 2 s"


def test_without_ray_one_line_says_so() -> None:
    """It is an extra: who names it in the settings may not have it."""
    script = "import sys; sys.modules['ray'] = None\n" + _CONNECT
    done = subprocess.run(
        [sys.executable, "-c", script, "auto"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "refused: Ray is not installed here\n"


def test_an_owner_in_ray_starts_no_cluster_where_its_reader_is_in_none() -> None:
    """An RTensor may name any owner: its reader says that it is not connected, and starts nothing."""
    script = """
import ray
from rollout_svc.tensors.rtensor import RTensor, localize
told = {"id": "a-1", "owner": "ray:there/owner", "nbytes": 8, "shape": [1], "dtype": "int64", "library": "numpy"}
print(repr(localize(RTensor.from_json(told), timeout_s=20.0, on_failure="place")), ray.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "unreachable" in done.stdout
    assert "not connected to a Ray cluster" in done.stdout
    assert done.stdout.endswith(" False\n")
