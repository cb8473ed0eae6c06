"""What every test gets: device tests are skipped where the device is missing, by looking at the device files."""

import re
from pathlib import Path

import pytest

DEVICE_FILES = {"npu": r"davinci\d+", "cuda": r"nvidia\d+"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-torch-npu",
        action="store_true",
        help="fail, rather than skip, where the contract with the real torch_npu cannot be tested (CI)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.name.startswith("test_matrix"))  # first what takes longest
    names = [path.name for path in Path("/dev").iterdir()]
    for marker, pattern in DEVICE_FILES.items():
        if any(re.fullmatch(pattern, name) for name in names):
            continue
        for item in items:
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"no {marker} device on this machine"))
