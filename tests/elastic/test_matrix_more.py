"""The other half of the columns of the kill matrix (see `test_matrix`)."""

import pytest

from tests.elastic.matrix import FAULTS, Matrix, run_column


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS[1::2])
def test_every_phase_with(fault: str, matrix: Matrix) -> None:
    run_column(fault, matrix)
