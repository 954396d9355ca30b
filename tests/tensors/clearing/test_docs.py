"""The program in docs/tensors.md, run as it stands."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "tensors.md"

if not PAGE.is_file():
    pytest.skip("the documents are not part of what is installed", allow_module_level=True)


def test_a_reader_can_run_the_example_as_it_stands(tmp_path: Path) -> None:
    """P29: two ranks read every batch, and nothing is left of it at any step end."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 40
    (tmp_path / "trainer.py").write_text(code)
    ran = subprocess.run(
        [sys.executable, "trainer.py"], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False
    )
    assert ran.returncode == 0, ran.stderr
    said = [line for line in ran.stdout.splitlines() if "shards." not in line]
    assert said == [line for step in range(3) for line in (f"[{step / 2}, {step / 2}]", "0 tensors left, 0 bytes")]


def test_the_example_ends_where_a_rank_has_died(tmp_path: Path) -> None:
    """Its error is told, and the rank that still waits for a batch is not waited for."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = code.replace("range(3)", "range(10**6)").replace(
        "print([answers.get(timeout=60)", "print([answers.get(timeout=2)"
    )
    (tmp_path / "trainer.py").write_text(code)
    with (tmp_path / "said").open("w") as said:
        running = subprocess.Popen(
            [sys.executable, "trainer.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=said, text=True
        )
    with running:
        assert running.stdout is not None
        while "tensors left" not in running.stdout.readline():
            assert running.poll() is None, (tmp_path / "said").read_text()
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        ranks = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(ranks[0], signal.SIGKILL)
        try:
            running.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.kill(ranks[1], signal.SIGKILL)
            raise
        finally:
            running.kill()
    assert running.returncode == 1
    assert "Empty" in (tmp_path / "said").read_text()
