"""One small Ray cluster for all tests of this folder."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_STORE_BYTES = 256 * 2**20


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Start a cluster on this machine, with a home of its own; gives its address.

    Its dashboard is what answers Ray's state API, which tells what objects and actors there are.
    """
    before = {name: os.environ.get(name) for name in ("HOME", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as home:
        os.environ["HOME"] = home
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # else it warns that this will change, an error here
        import ray

        ray.init(
            num_cpus=2,
            object_store_memory=_STORE_BYTES,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=0,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(Path(home) / "ray"),
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these are in the short part: together they take less than a minute."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.short)
