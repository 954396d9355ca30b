"""The program in docs/tensors.md, run as it stands."""

import re
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
