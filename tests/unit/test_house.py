"""Rules of the house: sizes, docstrings, cheap imports, what the wheel holds, what is pinned."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("raycp", "workers", "data_pipeline", "jobs", "benchmarks", "docs")
SOURCES = [path for folder in SOURCE_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *[ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run")],
]
MAX_LINES = 500
LIGHT = (
    "raycp",
    "raycp.config",
    "raycp.errors",
    "raycp.events",
    "raycp.plan",
    "data_pipeline",
    "data_pipeline.packing",
)
HEAVY = ("torch", "ray", "transformers", "datasets")
MACHINE_PATH = re.compile(r"(?<![\w.<-])/(?:home|root|work|Users)/\w")
HOST = re.compile(
    r"https?://[^\s/]*(?:pypi|pythonhosted|download\.pytorch|conda)[^\s]*|--(?:extra-)?index-url\s*[=\s]\s*\S"
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def size_problem(text: str) -> str | None:
    lines = text.count("\n")
    return f"{lines} lines, over {MAX_LINES}" if lines > MAX_LINES else None


def docstring_problem(text: str) -> str | None:
    return None if ast.get_docstring(ast.parse(text)) else "no module docstring"


def machine_problem(text: str) -> str | None:
    found = MACHINE_PATH.search(text) or HOST.search(text)
    return f"names a machine or an index: {found.group()!r}" if found else None


def ascii_problem(text: str) -> str | None:
    odd = next((c for c in text if ord(c) > 127), None)
    return f"holds {odd!r}" if odd else None


@pytest.mark.parametrize("rule", [size_problem, docstring_problem, ascii_problem], ids=lambda r: r.__name__)
def test_sources_keep_the_rules(rule) -> None:  # type: ignore[no-untyped-def]
    problems = {name_of(path): rule(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_no_file_names_this_machine_or_an_index() -> None:
    me = Path(__file__).resolve()
    problems = {name_of(p): machine_problem(p.read_text(encoding="utf-8")) for p in TEXTS if p.resolve() != me}
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (size_problem, "\n" * (MAX_LINES + 1)),
        (docstring_problem, "import os\n"),
        (ascii_problem, "x = '\N{EM DASH}'"),
        (machine_problem, "path = '/home/somebody/runs'"),
        (machine_problem, "pip install --extra-index-url https://example.org/simple torch"),
    ],
)
def test_each_rule_sees_a_planted_breach(rule, text: str) -> None:  # type: ignore[no-untyped-def]
    assert rule(text)


@pytest.mark.parametrize("module", LIGHT)
def test_import_is_light(module: str) -> None:
    assert loaded_by(f"import {module}") == []


def test_a_heavy_import_would_be_seen() -> None:
    assert loaded_by("import raycp.errors, ray") == ["ray"]


def loaded_by(statement: str) -> list[str]:
    """The heavy packages that a fresh interpreter has loaded after the statement."""
    code = f"import sys; {statement}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_wheel_holds_the_three_packages_and_nothing_else() -> None:
    from setuptools import find_packages

    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    found = find_packages(str(ROOT), include=table["include"])
    assert {name.split(".")[0] for name in found} == {"raycp", "workers", "data_pipeline"}
    folders = {
        name_of(p.parent).replace("/", ".") for p in SOURCES if p.is_relative_to(ROOT) and "__pycache__" not in p.parts
    }
    expected = {folder for folder in folders if folder.split(".")[0] in ("raycp", "workers", "data_pipeline")}
    assert set(found) == expected, "a package folder without __init__.py is left out of the wheel"


def test_every_typed_package_says_so() -> None:
    assert all((ROOT / package / "py.typed").exists() for package in ("raycp", "workers", "data_pipeline"))


def test_what_is_pinned_is_inside_the_bounds() -> None:
    """Every direct dependency, of the extras too, has a pin in constraints.txt that its bounds allow."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {canonical(line.split("==")[0]): line.split("==")[1] for line in lines}
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in [*project["dependencies"], *extras["demo"], *extras["dev"]]]
    outside = [str(r) for r in wanted if not r.specifier.contains(pins.get(canonical(r.name), "0"))]
    assert outside == []


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(t for extra in project["optional-dependencies"].values() for t in extra)]
    declared = {canonical(re.split(r"[\[<>=]", text)[0]) for text in texts}
    imported = {name: path for path in SOURCES for name in third_party(path.read_text(encoding="utf-8"))}
    from_tests = imported.pop("tests", None)  # benchmarks share the launcher of ranks; both are for a checkout only
    assert from_tests is None or "benchmarks" in from_tests.parts
    assert {canonical(name) for name in imported} - declared == set()
    assert third_party("import os, requests\nfrom yaml.nodes import Node\nfrom raycp import fit") == {
        "requests",
        "yaml",
    }


def third_party(text: str) -> set[str]:
    """Top-level names that the text imports and that are neither ours nor the standard library's."""
    nodes = list(ast.walk(ast.parse(text)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0]
    return {name.split(".")[0] for name in names} - set(SOURCE_FOLDERS) - sys.stdlib_module_names


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
