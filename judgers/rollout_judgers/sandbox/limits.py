"""What a program in the sandbox may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MIB", "Limits"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one run.

    Attributes:
        wall_s: seconds on the clock.
        cpu_s: seconds of a processor, for each process.
        memory_bytes: address space of each process.
        file_bytes: size of each file, and of all files together.
        processes: processes and threads at once.
        open_files: descriptors of each process.
        output_bytes: bytes of standard output, and of standard error; a program that writes more is killed.
    """

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 1024 * MIB
    file_bytes: int = 64 * MIB
    processes: int = 64
    open_files: int = 128
    output_bytes: int = MIB

    def as_arguments(self) -> list[str]:
        """Return them as `prlimit` takes them."""
        return [
            f"--cpu={math.ceil(self.cpu_s)}",
            f"--as={self.memory_bytes}",
            f"--fsize={self.file_bytes}",
            f"--nproc={self.processes}",
            f"--nofile={self.open_files}",
            "--core=0",
        ]
