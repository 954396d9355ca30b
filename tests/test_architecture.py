"""The house stands: floors, source roots, what an import costs, how long a file is."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rollout_svc"

if not PACKAGE.is_dir():
    pytest.skip("these tests read the sources, and only the installed package is here", allow_module_level=True)

GROUND = (
    *("errors", "events", "sample", "segment", "prompt", "group", "ledger", "gate", "signals", "tasks", "loop"),
    *("heavy", "conversation", "tool_calls", "stop_texts"),
    *(
        "config",
        "configfile",
        "feasible",
        "plan",
        "limits",
        "tokens",
        "chat_template",
        "plugins",
        "await_chain",
        "copying",
        "dense",
        "spans",
        "collective",
        "blame",
        "exits",
        "overflow",
        "real",
    ),
)
"""Imported by everyone; they import each other."""
FLOORS = (
    GROUND,
    ("tensors",),
    ("agent", "sessions", "judging", "filtering", "engines", "launching"),
    ("checking",),
    ("workers", "buffer", "trajectories", "preflight", "newcomers"),
    ("rollout",),
    ("producer",),
    ("batch", "batches", "batch_figures", "evaluations", "packing"),
    ("pause",),
    ("weights",),
    ("outside", "assembly"),
    ("concurrency", "fleet_requests", "pushing", "stuck", "status", "startup", "shutdown", "asking", "recovery"),
    ("service", "accounts"),
    ("rpc",),
    ("hosting",),
    ("sharding",),
    ("serve", "ray"),
    ("demo",),
    ("cli",),
    ("__main__",),
)
"""From the lowest up: what stands on one floor imports its own floor and those below."""
APART = ("embedded", "observe")
"""Beside the house, on the ground floor only: the embedded engine is another process, observers only listen."""
LEVELS = {name: level for level, names in enumerate(FLOORS) for name in names}
MAX_LINES = 400
"""Lines of a file of the package: one that needs more is two nouns."""
MAX_FUNCTION_LINES = 60
"""Lines of a function of the package, from its name on."""
MAX_TEST_LINES = 450
"""Lines of a file of tests, or of what stands beside the package."""
LEAN = ("rollout_svc", "rollout_svc.config", "rollout_svc.configfile", "rollout_svc.service", "rollout_svc.cli")
"""Modules whose import must be quick: torch costs 2.5 s, ray 1.2 s."""


def sources(folder: Path = PACKAGE) -> list[Path]:
    """List the Python files below a folder."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    """Name the module of a file in the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}


def imports(path: Path, nodes: Iterator[ast.AST] | None = None) -> Iterator[str]:
    """Yield the modules a file imports, inside functions too; names of ours are resolved down to modules."""
    for node in nodes or ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports here are absolute"
            module = node.module or ""
            inner = [f"{module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else module for name in inner)


def part_of(module: str) -> str | None:
    """Name the part of the house a module is in; None for what is not ours, and for the package itself."""
    first, _, rest = module.partition(".")
    return rest.split(".")[0] if first == "rollout_svc" and rest else None


def may_import(part: str, other: str) -> bool:
    """Say whether one part of the house may import another."""
    if part == other or other in GROUND:
        return True
    if part in APART or part in GROUND:
        return False
    if other in APART:  # the composition root and the commands start them
        return LEVELS[part] >= LEVELS["service"]
    return LEVELS[other] <= LEVELS[part]


def test_every_part_has_a_floor() -> None:
    """A new part of the package is given a floor, here, before anything imports it."""
    assert {part for module in MODULES if (part := part_of(module))} <= {*LEVELS, *APART}


def test_floors_import_only_downwards() -> None:
    """No file imports from a floor above its own, not even inside a function."""
    upward = [
        f"{module} imports {imported}"
        for module, path in MODULES.items()
        for imported in imports(path)
        if (part := part_of(module)) and (other := part_of(imported)) and not may_import(part, other)
    ]
    assert upward == []


def test_the_rule_of_floors_bites() -> None:
    """The rule above refuses what it should, and nothing that it should not."""
    assert may_import("service", "pause")
    assert may_import("cli", "embedded")
    assert may_import("observe", "events")
    assert not may_import("events", "observe")
    assert not may_import("config", "engines")
    assert not may_import("workers", "rollout")
    assert not may_import("embedded", "engines")
    assert not may_import("pause", "observe")


def test_modules_do_not_import_in_circles() -> None:
    """No module needs, while it is being imported, one that needs it."""
    graph = {
        module: {
            name
            for name in imports(path, iter(ast.parse(path.read_text(encoding="utf-8")).body))
            if name in MODULES and name != module
        }
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for imported in graph[module]:
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_plugins_point_inward() -> None:
    """The service never names its plugins' packages: it finds them by entry point."""
    plugins = {"rollout_agents", "rollout_judgers", "agents", "judgers"}
    named = [f"{path}: {name}" for path in sources() for name in imports(path) if name.split(".")[0] in plugins]
    assert named == []


def test_source_roots_are_no_packages() -> None:
    """`agents/` and `judgers/` have no `__init__.py`: a package called `agents` belongs to somebody else."""
    for root in ("agents", "judgers"):
        assert (ROOT / root).is_dir()
        assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("module", [name for name in LEAN if name in MODULES])
def test_an_import_loads_neither_torch_nor_ray(module: str) -> None:
    """Importing the service loads neither torch nor ray: they are imported where they are used."""
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'matplotlib'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50, cwd=ROOT
    )
    assert done.stdout.strip() == ""


def test_the_package_under_test_is_this_one() -> None:
    """The tests import the package they stand beside, or an installed one, never a third."""
    spec = importlib.util.find_spec("rollout_svc")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).parent == PACKAGE or "site-packages" in spec.origin


def test_no_file_is_too_long() -> None:
    """A file is one noun: none is longer than the limit."""
    limits = {"rollout_svc": MAX_LINES} | dict.fromkeys(("agents", "judgers", "bench", "tests"), MAX_TEST_LINES)
    long = {
        str(path.relative_to(ROOT)): count
        for folder, limit in limits.items()
        for path in sources(ROOT / folder)
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > limit
    }
    assert long == {}


def test_no_function_is_too_long() -> None:
    """A function is read at once: none of the package is longer than the limit, its words included."""
    long = {
        f"{module}:{node.lineno} {node.name}": count
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}
