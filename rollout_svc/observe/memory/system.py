"""What a bug report on memory has to say of a machine: versions, allocator, limits."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

__all__ = ["describe_system"]

_SETTINGS: Final = (
    *("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("PYTHONMALLOC", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RAY_object_store_memory"),
)
"""Variables of the environment that change how memory is kept."""
_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_PROJECT: Final = "rollout-svc"


def describe_system() -> dict[str, Any]:
    """Versions of what is installed and loaded, the allocator and its settings, the machine's memory; blocks."""
    loaded = {name: _version(name) for name in ("torch", "ray", "numpy")}
    return {
        "rollout_svc": _installed(_PROJECT),
        "python": platform.python_version(),
        **loaded,
        "libc": _libc(),
        "allocator": _allocator(),
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "cpus": os.cpu_count() or 0,
        "memory_bytes": _meminfo("MemTotal"),
        "memory_limit_bytes": _limit(),
    }


def _version(name: str) -> str | None:
    """The version of a package, and whether this process has it loaded; None: it is not installed."""
    version = _installed(name)
    if version is None or name in sys.modules:
        return version
    return f"{version}, not loaded"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _libc() -> str:
    try:
        function = ctypes.CDLL(None).gnu_get_libc_version
    except (OSError, AttributeError):
        return " ".join(platform.libc_ver()).strip() or "unknown"
    function.restype = ctypes.c_char_p
    return f"glibc {function().decode()}"


def _allocator() -> str:
    """Whose malloc it is."""
    try:
        mapped = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return "unknown"
    return next((name for name in _ALLOCATORS if f"lib{name}" in mapped), "malloc of the C library")


def _meminfo(key: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _limit() -> int | None:
    """What the container may have; None: there is no limit."""
    for path in _LIMITS:
        try:
            said = Path(path).read_text().strip()
        except OSError:
            continue
        if said.isdigit() and int(said) < 2**60:
            return int(said)
    return None
