"""What several files of this folder share."""

from collections.abc import Iterator

import pytest

from tests.elastic.matrix import Matrix


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = Matrix(tmp_path_factory.mktemp("matrix"))
    yield made
    made.close()
