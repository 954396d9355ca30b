"""Case `byref`: bytes of 64 MiB of routed experts that pass through a loop of the service on their way to a trainer.

- They come as LMDeploy's Ray executor sends them: a key in the answer, the tensor in Ray's store. (What an engine
  writes into its HTTP body has to be read from a socket, whatever becomes of it: `bench.stall` is about that.)
- Counted are the tensors touched in a thread with an event loop, from within the service's process, and those that are
  in what `take_batch` returns instead of beside it. The worst round counts.
- A trainer gets all of them, and every one is what the engine had: else there is no figure.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.cluster.deployments import OnRay, canned, config
from bench.cluster.watched import read_counts
from bench.report import Missing, Point, progress
from bench.served import GROUP_SIZE
from bench.workload import PROMPT_TOKENS

if TYPE_CHECKING:
    from bench.cluster.nodes import Nodes

__all__ = ["byref"]

BOUND = 0.0
LAYERS, TOP_K, EXPERTS = 128, 16, 512
"""Of the model: 4 KiB a token, so that 8 MiB a sample are no more than 2,048 tokens of it."""
ROWS = 2048
"""Of one sample: 8 MiB, uint16. The eight of a group have 64; over several shards a batch has a group of each."""
KEY = "ab" * 28
"""The one key that all answers have: what it names is handed out again and again."""


class SharedStore:
    """LMDeploy's actor of that name, as far as it is asked: it hands out one tensor, whatever the key."""

    def __init__(self, rows: int) -> None:
        self._tensor = routing(rows)

    def get(self, key: str) -> Any:
        """Hand it out."""
        del key
        return self._tensor


def routing(rows: int) -> np.ndarray[Any, Any]:
    """The routing of one sample, the same each time it is made."""
    return np.random.default_rng(5).integers(0, EXPERTS, (rows, LAYERS, TOP_K), dtype=np.uint16)


def byref(nodes: Nodes, rounds: int, shards: int = 1) -> Point | Missing:
    """Measure case `byref`; over several shards their processes count, and the coordinator's too."""
    import ray  # noqa: PLC0415 - a second to import, for who has a cluster

    options: dict[str, Any] = {"name": "shared_store", "namespace": "lmdeploy", "num_cpus": 0}
    rows = ROWS // shards
    kept: Any = ray.remote(SharedStore).options(**options).remote(rows)
    tokens = rows + 1 - PROMPT_TOKENS
    flags = ("--delay", 0.1, "--response-tokens", tokens, "--routed-experts", KEY)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        counts = Path(folder) / "counts"
        workers = [canned(*flags, on_ray=True, dialect="lmdeploy") for _ in range(shards)]
        journal = Path(folder) / "journal" if shards > 1 else None
        settings = config(workers, GROUP_SIZE, tokens, shards=shards, journal=journal)
        settings["tasks"][0]["judger"] = {"path": "bench.cluster.watched:Judge", "counts": str(counts)}
        settings["experts"] = {
            "enabled": True,
            "store": "ray",
            "layers": LAYERS,
            "top_k": TOP_K,
            "num_experts": EXPERTS,
        }
        settings["trainer"]["max_staleness"] = 0  # one batch in the store, and one that is read
        with OnRay(nodes, settings, "byref") as ours:
            found = [_round(ours, counts, shards, rows) for _ in range(rounds)]
    ray.kill(kept)
    if None in found:
        return Missing("byref", "a batch taken over Ray brings no routed experts", BOUND)
    moved = [one for one in found if one is not None]
    return Point("byref", max(passed for passed, _ in moved), min(whole for _, whole in moved), BOUND)


def _round(ours: OnRay, counts: Path, groups: int, rows: int) -> tuple[int, int] | None:
    """Take one batch, and read it; returns bytes that passed through a loop, and bytes that came."""
    import ray  # noqa: PLC0415 - as above

    before = read_counts(counts)
    reference, batch = ours.lease(groups)
    returned = ray.experimental.get_local_object_locations([reference])[reference]["object_size"]
    if not hasattr(batch, "take_experts"):
        return None
    tensors = batch.take_experts()
    expected = routing(rows)
    if len(tensors) != groups * GROUP_SIZE or not all(np.array_equal(one.read(), expected) for one in tensors.values()):
        raise RuntimeError(f"{len(tensors)} tensors came, or others than the engine's")
    after = read_counts(counts)
    in_loops, elsewhere = after.in_loops - before.in_loops, after.elsewhere - before.elsewhere
    if in_loops + elsewhere < groups * GROUP_SIZE * expected.nbytes:
        raise RuntimeError(f"{before}, then {after}: tensors came, and whoever watches saw fewer")
    progress(
        f"byref: {in_loops} bytes in loops, {elsewhere} in other threads; take_batch returned {returned} bytes "
        f"and {len(tensors)} references"
    )
    return in_loops + returned // expected.nbytes * expected.nbytes, sum(one.nbytes for one in tensors.values())
