"""Which part of a command Python can run inside an actor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollout_svc.launching.cluster.grouped import Inside, grouped, python_of


def script(folder: Path, first: str) -> str:
    """Write a program with that first line."""
    path = folder / "program"
    path.write_text(f"{first}\nimport sys\nsys.exit(7)\n")
    path.chmod(0o755)
    return str(path)


def test_pythons_part_of_a_command(tmp_path: Path) -> None:
    """A module, a script, or a program that Python runs; nothing of what is another's, or only a string."""
    assert python_of([sys.executable, "-m", "m", "-a"]) == ("-m", "m", "-a")
    assert python_of([sys.executable, "s.py", "1"]) == ("s.py", "1")
    assert python_of([sys.executable, "-c", "pass"]) is None
    assert python_of([sys.executable]) is None
    assert python_of(["no-such-program"]) is None
    assert python_of([script(tmp_path, "#!/bin/sh"), "x"]) is None
    assert python_of([script(tmp_path, "#!/usr/bin/env python3"), "x"]) == (str(tmp_path / "program"), "x")


def test_a_command_line_that_runs_another() -> None:
    """The group, the bundle, and the command as it was."""
    assert grouped("py", "ab12", 3, ("lmdeploy", "serve"))[3:] == ("ab12", "3", "lmdeploy", "serve")


@pytest.mark.parametrize(("words", "code"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1), ("print('hi')", 0)])
def test_what_is_run_inside_says_and_ends(tmp_path: Path, words: str, code: int) -> None:
    """Its exit code is returned; what it says is in the log, after what is there; what Ray gives stays."""
    (tmp_path / "s.py").write_text(f"import os, sys\nassert os.environ['MINE'] == '1'\n{words}\n")
    log = tmp_path / "log"
    log.write_text("before\n")
    env = {"MINE": "1", "RAY_X": "theirs", "CUDA_VISIBLE_DEVICES": "9"}
    runs = (
        "import os, sys\n"
        f"from {Inside.__module__} import Inside\n"
        f"code = Inside().run(['s.py', 'a'], {env!r}, {str(log)!r}, {str(tmp_path)!r})\n"
        "assert 'RAY_X' not in os.environ and os.environ.get('CUDA_VISIBLE_DEVICES') != '9'\n"
        "sys.stdout.flush()\n"
        "sys.stderr.flush()\n"
        "os._exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", runs], check=False, timeout=30)
    assert done.returncode == code
    assert log.read_text() == "before\n" + {"print('hi')": "hi\n", "sys.exit('no')": "no\n"}.get(words, "")
