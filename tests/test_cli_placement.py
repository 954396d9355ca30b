"""`serve --dry-run` tells of a placement that is ignored."""

from pathlib import Path

import pytest

from tests.support.commands import run

CONFIG = """
tokenizer: {path: bytes}
workers:
  - url: http://127.0.0.1:1
  - launch:
      command: [python, engine.py, "{port}"]
      placement: {bundles: [3, 1], tensor_parallel: 2, %s}
tasks:
  - {name: math, prompts: {push: true}, judger: {name: exact}}
"""
REMARK = (
    "warning:     workers.1.launch.placement: ignored: the engine owns its placement group (owns_group), "
    "so the bundles [3, 1] are not passed on"
)


@pytest.mark.parametrize(("owner", "told"), [("owns_group: true", [REMARK]), ("group: trainer", [])])
def test_a_placement_that_is_ignored_is_told_of(owner: str, told: list[str], tmp_path: Path) -> None:
    """P35: a setting that has no effect is said to have none, before anything is started; one that has is not."""
    config = tmp_path / "service.yaml"
    config.write_text(CONFIG % owner)
    done = run("serve", "--config", config, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if "placement:" in line and "ignored" in line] == told
