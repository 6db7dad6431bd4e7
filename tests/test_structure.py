"""What must stay true of the whole: imports go one way, importing is light, user mistakes raise."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A room imports only rooms before it.
ROOMS = [
    "positions",
    "kernels",
    "rotation",
    "frequencies",
    "extension",
    "embedding",
    "attention",
    "beyond_rotation",
    "presets",
    "memory",
    "timm_vit",
    "conversion",
]
PACKAGES = ["axial_rope", "models", "train"]


def imported(path):
    """Names of the modules of this project that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_one_way(package):
    later = PACKAGES[PACKAGES.index(package) + 1 :] + ["tests", "benchmarks"]
    for path in sources(package):
        for module in imported(path):
            assert module.split(".")[0] not in later, f"{path} imports {module}"


def test_rooms_import_one_way():
    for path in sources("axial_rope"):
        room = path.relative_to(ROOT / "axial_rope").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ROOMS, f"{room} has no place in the order of rooms"
        for module in imported(path):
            if module.startswith("axial_rope."):
                other = module.split(".")[1]
                assert other == room or ROOMS.index(other) < ROOMS.index(room), f"{path} imports {module}"


def test_importing_loads_torch_and_einops_alone():
    code = (
        "import sys, torch, einops; before = set(sys.modules); import axial_rope;"
        "print({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert ast.literal_eval(loaded) == {"axial_rope"}


def test_no_assert_and_no_swallowed_arguments_outside_tests():
    for package in [*PACKAGES, "benchmarks"]:
        for path in sources(package):
            for node in ast.walk(ast.parse(path.read_text())):
                assert not isinstance(node, ast.Assert), f"{path}:{node.lineno} asserts"
                public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
                assert not (public and node.args.kwarg), f"{path}:{node.lineno} takes **{node.args.kwarg.arg}"


def test_files_stay_rooms():
    for package in [*PACKAGES, "benchmarks", "tests"]:
        for path in sources(package):
            lines = len(path.read_text().splitlines())
            assert lines <= 450, f"{path} has {lines} lines: two rooms"


def test_every_pitfall_names_its_tests():
    named = re.findall(r"\b(\w+)::(\w+)", (ROOT / "docs" / "pitfalls.md").read_text())
    assert len(named) > 100
    for file, name in named:
        if file != "py":  # the pattern at the head
            assert f"def test_{name}(" in (ROOT / "tests" / f"test_{file}.py").read_text(), f"{file}::{name}"
