"""The structure of the package: imports without cycles and along one direction, small folders, files and functions."""

from __future__ import annotations

import ast
import functools
import graphlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER_FILES, FILE_LINES, FUNCTION_LINES, TEST_LINES = 20, 300, 50, 400
# A folder (or single file) imports only from earlier levels; those of one level never import each other.
LEVELS = [
    ("errors",),
    ("registry", "quantities", "steps", "torch_private", "installed", "cpu_features"),
    ("kernels",),
    ("codecs",),
    ("memory",),
    ("collectives",),
    ("distributed",),
    ("config",),
    ("planner", "terminal"),
    ("lab", "data_parallel", "pipeline", "elastic"),
    ("local_steps", "boundaries"),
    ("train", "theory", "parallel"),
    ("thinwire",),  # the public names
    ("report", "bench", "doctor"),
    ("plan", "demo", "watch", "run"),
    ("cli",),
    ("__main__",),
]
ALLOWED: dict[str, str] = {}  # a file's or function's name → why it is longer than the limit


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name → file."""
    found = {}
    for path in sorted((ROOT / "thinwire").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file; `from a import b` is a.b where that is our module."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (whole & modules().keys()) | ({str(node.module)} if whole - modules().keys() else set())
    return names


def folder(module: str) -> str:
    """thinwire.train.model.blocks → train."""
    return f"{module}.".split(".")[1] or module


@functools.cache
def graph() -> dict[str, set[str]]:
    """Module → our modules that it imports."""
    return {name: imports(path) & modules().keys() for name, path in modules().items()}


def no_cycle(edges: dict[str, set[str]]) -> None:
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"an import cycle: {' → '.join(reversed(error.args[1]))}") from None


def test_no_import_cycle_between_files():
    no_cycle(graph())


def test_no_import_cycle_between_folders():
    edges: dict[str, set[str]] = {}
    for module, others in graph().items():
        edges.setdefault(folder(module), set()).update({folder(other) for other in others} - {folder(module)})
    no_cycle(edges)


def test_imports_follow_the_one_direction():
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    unplaced = {folder(module) for module in graph()} ^ set(level)
    assert unplaced == set(), "a folder without a level, or a level without a folder"
    wrong = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if folder(other) != folder(module) and level[folder(other)] >= level[folder(module)]
    ]
    assert wrong == []


def test_planner_never_imports_torch_distributed():
    wrong = []
    for module, path in modules().items():
        if folder(module) == "planner":
            names = imports(path) | {f"torch.{alias}" for alias in taken_from_torch(path)}
            wrong += [f"{module} imports {name}" for name in names if name.startswith("torch.distributed")]
    assert wrong == []


def taken_from_torch(path: Path) -> set[str]:
    nodes = [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.ImportFrom) and n.module == "torch"]
    return {alias.name for node in nodes for alias in node.names}


def test_no_folder_has_too_many_files():
    counts: dict[str, int] = {}
    for path in modules().values():
        counts[str(path.parent.relative_to(ROOT))] = counts.get(str(path.parent.relative_to(ROOT)), 0) + 1
    assert {name: count for name, count in counts.items() if count > FOLDER_FILES} == {}


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(ROOT)): lines_of(path) for path in modules().values()}
    assert {name: n for name, n in lengths.items() if n > FILE_LINES and name not in ALLOWED} == {}
    tests = {path.name: lines_of(path) for path in Path(__file__).parent.glob("*.py")}
    assert {name: n for name, n in tests.items() if n > TEST_LINES} == {}


def test_no_function_is_too_long():
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, path in modules().items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > FUNCTION_LINES and name not in ALLOWED} == {}
