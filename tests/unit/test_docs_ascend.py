"""docs/ascend.md names what the code has."""

import re
from pathlib import Path

import pytest

from raycp.attention.kernels.npu import LIMITS
from raycp.training.vendor import COMMON, CUDA, NPU

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ascend.md").read_text()


@pytest.mark.parametrize("name", sorted({v.name for v in (*COMMON, *NPU, *CUDA)}))
def test_every_variable_is_explained(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"\b(?:deploy|tests|jobs)/[\w/.-]*\w", TEXT))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = set(re.findall(r"\]\((\w+\.md)\)", TEXT))
    assert [name for name in links if not (ROOT / "docs" / name).exists()] == []


def test_limits_are_those_of_the_code() -> None:
    assert f"At most {LIMITS.documents:,} documents".replace(",", " ") in TEXT
    assert f"{LIMITS.heads} query heads, a head dim above {LIMITS.dim}" in TEXT
