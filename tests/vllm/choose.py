"""Chooses which of the tests against a real vLLM have to run, and remembers what they proved.

    python -m tests.vllm.choose             prints `test-vllm` or `test-vllm-smoke`, and on standard error why
    python -m tests.vllm.choose --record    writes down that the whole of them passed on what is here

Invariant: a digest stands for contents alone, not for commits or times: the same files have the same digest in a
checkout, in a clone and in an unpacked archive, committed or not.
"""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PROVED: Final = Path(__file__).with_name("proved.txt")
WATCHED: Final = (
    *("rollout_svc/engines", "rollout_svc/workers", "rollout_svc/weights", "rollout_svc/pause"),
    "tests/conformance",
)
"""What speaks to engines, stops them or gives them weights, and the promises that are run here as well."""
OWN: Final = "tests/vllm"
HEADER: Final = "# What `make test-vllm` last passed on, all of it: see choose.py.\n"


def digest_of(root: Path) -> str:
    """The digest of the watched folders and of these tests."""
    total = sha256()
    for path in sorted(file for name in (*WATCHED, OWN) for file in (root / name).rglob("*") if _counts(file)):
        contents = sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(root).as_posix()} {contents}\n".encode())
    return total.hexdigest()


def _counts(path: Path) -> bool:
    return path.suffix == ".py" or path.name == "requirements.txt"


def choose(root: Path, proved: str) -> tuple[str, str]:
    """The target to make, and why."""
    if digest_of(root) in proved.split():
        return "test-vllm-smoke", "the whole of it passed on these very files"
    return "test-vllm", f"{', '.join(WATCHED)} or {OWN} changed since the whole of it passed"


def main() -> None:
    """Do what the command line says."""
    if sys.argv[1:] == ["--record"]:
        PROVED.write_text(f"{HEADER}{digest_of(ROOT)}\n", encoding="utf-8")
        return
    target, why = choose(ROOT, PROVED.read_text(encoding="utf-8") if PROVED.exists() else "")
    sys.stderr.write(f"real vLLM: make {target}, for {why}\n")
    sys.stdout.write(f"{target}\n")


if __name__ == "__main__":
    main()
