"""What the documents point at is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

if not DOCS.is_dir():
    pytest.skip("these tests read the documents, and only the installed package is here", allow_module_level=True)

PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])


def functions(path: Path) -> set[str]:
    """Name the functions of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link, and every picture, is a file of the project."""
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_each_promise_of_stopping_is_held_by_tests_that_name_it() -> None:
    """The table's tests exist where it says, and carry the number of their promise."""
    rows = re.findall(
        r"^\| (P\d+)[ S]* \| .* \| (.*) \|$", (DOCS / "stopping.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [number for number, _ in rows] == [f"P{n}" for n in (*range(1, 4), *range(5, 19), 21)]
    for number, cell in rows:
        for name, target in re.findall(r"\[`(\w+)`\]\(\.\./([^)]+)\)", cell):
            path = ROOT / target
            assert name in functions(path), f"{number}: {name} is not in {target}"
            docstring = path.read_text(encoding="utf-8").partition(f"def {name}(")[2][:600]
            assert re.search(rf"{number}\b", docstring), f"{name} does not name {number}"
