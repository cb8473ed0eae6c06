"""A whole run on CPUs where torch_npu is installed and CANN is not: `import torch` itself fails there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_plain_torch import environ  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import dataclasses, pathlib, sys
import raycp
from tests.elastic.runs import config, make_folder

folder = pathlib.Path(sys.argv[1])
settings = dataclasses.replace(config(workers=2, cp=2), steps=1, peak_flops="1e12")
result = raycp.fit(**make_folder(folder), output_dir=folder / "out", config=settings)
print("steps", result.steps)
"""


@pytest.mark.slow
def test_ranks_on_cpus_run(environ: dict[str, str], tmp_path: Path) -> None:  # noqa: F811
    plain = {name: value for name, value in environ.items() if name != "RAY_ADDRESS"}
    words = [sys.executable, "-c", RUN, str(tmp_path / "run")]
    os.mkdir(tmp_path / "run")
    done = subprocess.run(words, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=240)
    assert "steps 1" in done.stdout, done.stderr
    assert "mfu=" in done.stderr  # of the FLOP/s that the user gave
