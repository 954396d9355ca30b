"""P29, P30: 300 steps of a controller, 2 storage owners and 12 consumer processes (`make test-shards`)."""

import pytest

from tests.support.shard_processes import slope
from tests.tensors.clearing.test_processes import house, run

STEPS = 300
TENSORS = 4
"""Of each owner, in each step."""
BYTES = 100 * 1024
WARM = 100
"""Steps until pools and caches have their sizes."""
FLAT = 0.005
"""Of the bytes that pass through a process in a step: what it may grow by in one."""


@pytest.mark.timeout(280)
def test_300_steps_leave_nothing_and_memory_is_flat() -> None:
    """P29, P30: entries and bytes are zero at every step end, the failed delete's a step on; RSS is flat."""
    with house(("actor", "critic", "reference"), 2) as built:
        run(built, STEPS, TENSORS, BYTES, hang=True)
        lasting = {address: values for address, values in built.rss.items() if len(values) == STEPS - 2}
    assert len(built.rss) == 14
    assert len(lasting) == 14
    slopes = {address: slope(values[WARM:]) for address, values in lasting.items()}
    passing = 2 * TENSORS * BYTES
    told = f"RSS of {len(slopes)} processes, bytes a step: {sorted(map(round, slopes.values()))}"
    print(f"{told}; {passing} pass through")  # noqa: T201 - the measure
    assert max(slopes.values()) < FLAT * passing, slopes
