"""A batch in parts: packed, it is the same as a batch of all its groups."""

from __future__ import annotations

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.batch import Batch
from rollout_svc.ledger import Ledger
from rollout_svc.packing.batch import head, pack, rows
from rollout_svc.packing.parts import joined, part_of
from rollout_svc.packing.reading import experts_of, read_batch
from rollout_svc.tensors import Handles
from tests.support.routed import ready_group

shapes = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.integers(0, 2)), min_size=1, max_size=5
)


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_parts_make_the_body_that_one_batch_makes(shapes: list[tuple[int, int, bool, int]]) -> None:
    """P27: whichever part a group is in, with routed experts or without: rows, groups, head and bytes are the same."""
    handles = Handles()
    groups = [
        ready_group(Ledger(), handles, f"g{number}", size=size, tokens=tokens, routed=routed)
        for number, (size, tokens, routed, _) in enumerate(shapes)
    ]
    homes = sorted({home for *_, home in shapes})
    dealt = [[group for group, shape in zip(groups, shapes, strict=True) if shape[3] == home] for home in homes]
    parts = [part_of(Batch("b", 3, tuple(own), {})) for own in dealt]
    whole = Batch("b", 3, tuple(group for own in dealt for group in own), {"groups": len(groups)})
    taken, told = joined(whole.head(), parts)
    assert orjson.loads(told) == orjson.loads(head(whole))
    assert [row.group for row in taken] == [row.group for row in rows(whole)]
    body, expected = b"".join(pack(taken, told)), b"".join(pack(rows(whole), head(whole)))
    assert body == expected
    found = experts_of(read_batch(body))
    assert found.keys() == (lent := whole.take_experts()).keys()
    assert all(np.array_equal(found[name], handle.read()) for name, handle in lent.items())
    for group in groups:
        for sample in group.samples:
            if sample.experts is not None:
                sample.experts.release("the test")
