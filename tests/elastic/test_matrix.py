"""The kill matrix on a real Ray cluster: a diagonal of it in the quick suite, all of it in the whole one.

The other half of its columns is in `test_matrix_more`, so that both run side by side, each on a cluster of its own.
"""

import pytest

from tests.elastic.matrix import DIAGONAL, FAULTS, PAIRS, PHASES, Matrix, pair, run_column, table
from tests.elastic.scripted_driver import CHECKPOINT_EVERY


def test_every_pair_is_listed_with_its_cost_or_a_reason() -> None:
    assert len(PAIRS) == len(PHASES) * len(FAULTS) == len({(p.phase, p.fault) for p in PAIRS})
    for found in PAIRS:
        assert bool(found.why_not) != found.occurs
        assert 0 <= found.lost <= 3 * CHECKPOINT_EVERY
        assert found.lost <= found.redone <= 3 * CHECKPOINT_EVERY + 2
        if found.lost:
            assert found.fault == "corrupt checkpoint", "no single fault of two nodes may cost a committed step"


def test_the_diagonal_has_every_phase_and_every_fault() -> None:
    quick = {*DIAGONAL, ("backward", "node joins")}
    assert {phase for phase, _ in quick} == set(PHASES)
    assert {fault for _, fault in quick} == set(FAULTS)
    assert all(pair(*one).occurs for one in quick)


def test_the_table_shows_what_was_not_run() -> None:
    text = table({}, "nowhere")
    assert text.count("\n| ") == len(PHASES) + 1
    assert text.count("| n/a") == sum(not p.occurs for p in PAIRS)


@pytest.mark.timeout(600)
def test_the_diagonal(matrix: Matrix) -> None:
    results, problems = matrix.run([pair(*one) for one in DIAGONAL])
    for result in results:
        print(f"{result.case.name}: {result.seconds:.2f} s, redone {result.redone}, {' '.join(result.events)}")
    assert problems == []


def test_a_node_that_joins_is_used_at_the_next_step(matrix: Matrix) -> None:
    (result,), problems = matrix.run([pair("backward", "node joins")])
    assert problems == []
    assert result.events == ("resized",)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS[::2])
def test_every_phase_with(fault: str, matrix: Matrix) -> None:
    """The table of all results is in build/kill_matrix.md then."""
    run_column(fault, matrix)
