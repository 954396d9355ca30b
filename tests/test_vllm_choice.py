"""Which of the tests against a real vLLM run is decided by what the files say, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.choose import OWN, WATCHED, choose, digest_of


def write(root: Path, **changes: str) -> Path:
    """A tree with one module in each watched folder, and the file that says which engine."""
    for name in (*WATCHED, OWN):
        (root / name / "inner").mkdir(parents=True)
        (root / name / "inner" / "module.py").write_text(changes.get(name.rsplit("/", 1)[1], "x = 1\n"))
    (root / OWN / "requirements.txt").write_text(changes.get("requirements", "engine==1\n"))
    return root


def test_what_passed_is_not_repeated(tmp_path: Path) -> None:
    """On the very files the whole of it passed on, wherever they lie, the small run is enough."""
    proved = f"# a note\n{digest_of(write(tmp_path / 'here'))}\n"
    elsewhere = write(tmp_path / "there")
    (elsewhere / OWN / "proved.txt").write_text(proved)
    (elsewhere / OWN / "inner" / "module.pyc").write_text("compiled")
    assert choose(elsewhere, proved)[0] == "test-vllm-smoke"


@pytest.mark.parametrize("changed", ["engines", "workers", "weights", "pause", "conformance", "vllm", "requirements"])
def test_any_change_asks_for_the_whole(tmp_path: Path, changed: str) -> None:
    """One other byte in a watched folder, in these tests, or in the engine's version: all of it runs."""
    proved = digest_of(write(tmp_path / "before"))
    target, why = choose(write(tmp_path / "after", **{changed: "x = 2\n"}), proved)
    assert target == "test-vllm"
    assert "changed" in why


def test_nothing_on_record_asks_for_the_whole(tmp_path: Path) -> None:
    """Without a record nothing is proved."""
    assert choose(write(tmp_path), "")[0] == "test-vllm"
