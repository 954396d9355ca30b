"""What is read of processes and files: the real ones."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from rollout_svc.observe.memory.foreign import RayBytes, TorchBytes
from rollout_svc.observe.memory.heap import heap
from rollout_svc.observe.memory.probe import CHILDREN, OWN, Probe
from rollout_svc.observe.memory.system import describe_system
from rollout_svc.tensors.shared import SharedStore

MB = 10**6


def test_the_heap_grows_with_arrays_and_with_small_objects() -> None:
    """What malloc gave out, and what Python's own allocator did, are both in it; freed, it goes down again."""
    before = heap()
    assert before.free is not None
    array = np.ones(20 * MB, dtype=np.uint8)
    assert 19 * MB <= heap().used - before.used <= 22 * MB
    kept = [str(number) for number in range(100_000)]
    assert heap().used - before.used >= 25 * MB
    del array, kept
    assert heap().used - before.used <= 5 * MB


def test_this_process_is_read() -> None:
    """Resident memory as the kernel says, and what of it is heap."""
    own = Probe().read()[OWN]
    assert own["rss"] > own["python_heap"] > 0
    ballast = np.ones(40 * MB, dtype=np.uint8)
    more = Probe().read()[OWN]
    assert more["rss"] - own["rss"] >= 35 * MB
    assert more["python_heap"] - own["python_heap"] >= 35 * MB
    del ballast


def test_files_are_known_by_their_patterns(tmp_path: Path) -> None:
    """The journal with what lies beside it is one account; a name with brackets is a name; nothing there is nothing."""
    (tmp_path / "j.db").write_bytes(b"1" * 100)
    (tmp_path / "j.db-wal").write_bytes(b"1" * 30)
    (tmp_path / "other").write_bytes(b"1" * 7)
    files = {"journal_disk": (f"{tmp_path}/j.db", f"{tmp_path}/j.db-wal"), "trajectories_disk": (f"{tmp_path}/no*",)}
    own = Probe(files).read()[OWN]
    assert (own["journal_disk"], own["trajectories_disk"]) == (130, 0)


def test_open_files_are_those_that_are_written_and_not_known(tmp_path: Path) -> None:
    """A file that is open for writing counts, a deleted one too; one that is read, known, or memory does not."""
    known = tmp_path / "known"
    before = Probe().read()[OWN]["open_files"]
    with (
        tempfile.TemporaryFile(buffering=0) as deleted,
        known.open("wb", buffering=0) as written,
        Path(sys.executable).open("rb"),
        os.fdopen(os.memfd_create("memory"), "wb", buffering=0) as memory,
    ):
        for file, size in ((deleted, 1000), (written, 200), (memory, 50)):
            file.write(bytes(size))
        assert Probe().read()[OWN]["open_files"] - before == 1200
        assert Probe({"known": (str(known),)}).read()[OWN]["open_files"] - before == 1000


def test_shared_memory_of_ours_is_counted_by_name() -> None:
    """A segment of the store counts from `put` to `free`."""
    gc.collect()  # what other tests mapped goes now, not meanwhile
    before = Probe().read()[OWN]["shared_memory"]
    stored = SharedStore().put(np.ones(8 * MB, dtype=np.uint8))
    assert Probe().read()[OWN]["shared_memory"] - before >= 4 * MB  # of 8: others' may still be unmapped meanwhile
    stored.free()
    assert Probe().read()[OWN]["shared_memory"] <= before + MB


def test_processes_are_read_with_what_they_started() -> None:
    """A launched one has its own row, its children in it; others are `children`; one that ended has none."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the inner one runs
        named = Probe().read({"engine w0": process.pid})
        assert named["engine w0"]["rss"] > 8 * MB
        others = Probe().read()[CHILDREN]["rss"]
        assert others >= named["engine w0"]["rss"] * 0.9
        assert named[CHILDREN]["rss"] <= others - named["engine w0"]["rss"] * 0.5
        process.communicate(b"\n", timeout=20)
    assert "engine w0" not in Probe().read({"engine w0": process.pid})


def test_tensors_are_counted_once_per_storage() -> None:
    """Views share a storage; scans are rare where they are slow."""
    import torch

    now = [0.0]

    def clock() -> float:
        now[0] += 0.5  # a scan takes half a second
        return now[0]

    counted = TorchBytes(clock)
    before = counted.read()["torch_cpu"]
    tensor = torch.zeros(MB, dtype=torch.float32)
    views = [tensor[1:], tensor.view(-1)]
    assert counted.read()["torch_cpu"] == before  # too early for another scan
    now[0] += 1000
    assert counted.read()["torch_cpu"] - before == 4 * MB
    assert len(views) == 2
    assert "torch_cuda" not in counted.read()


def test_neither_torch_nor_ray_is_imported_by_looking() -> None:
    """A process without them stays without them, and has no such accounts."""
    code = """
import sys
from rollout_svc.observe.memory import Probe, describe_system
own = Probe().read()["service"]
assert not {"torch_cpu", "torch_cuda", "ray_store", "ray_spilled"} & set(own), own
assert describe_system()["torch"].endswith("not loaded")
assert not {"torch", "ray"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ray_that_is_not_there_is_not_asked() -> None:
    """Not connected: no accounts, and no trouble."""
    asked = RayBytes()
    assert asked.read() == {}
    assert asked.trouble == ""


def test_the_system_is_described() -> None:
    """Versions, the allocator and its settings, the machine."""
    told = describe_system()
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert told["libc"].startswith("glibc ")
    assert told["memory_bytes"] > 0
    assert set(told) >= {"rollout_svc", "torch", "ray", "numpy", "allocator", "settings", "memory_limit_bytes"}
