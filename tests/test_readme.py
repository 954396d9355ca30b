"""The README says what is there: its trainer loops are the examples, word for word."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

if not (ROOT / "README.md").is_file():
    pytest.skip("the README is not part of what is installed", allow_module_level=True)

EXAMPLES = ("train_disk.py", "train_external.py", "train_publish.py", "ray_job.py")
MAX_LOOP_LINES = 40


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_readme_shows_the_example_that_is_run(name: str) -> None:
    """A reader copies the loop from the README: it is the file that the tests run."""
    example = (ROOT / "examples" / name).read_text().rstrip()
    assert f"```python\n{example}\n```" in (ROOT / "README.md").read_text()
    assert len(example.splitlines()) <= MAX_LOOP_LINES


def test_every_file_the_readme_points_to_exists() -> None:
    """No dead ends."""
    readme = (ROOT / "README.md").read_text()
    for path in ("docs/loop.svg", "docs/design.md", "bench/README.md", "CONTRIBUTING.md", "configs/sglang.yaml"):
        assert path in readme
        assert (ROOT / path).exists()
