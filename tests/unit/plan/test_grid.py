import pytest

from raycp.errors import PlanError
from raycp.plan import RankGrid


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 2), (3, 4, 1), (1, 5, 3)])
def test_ranks_and_coordinates_are_a_bijection(shape: tuple[int, int, int]) -> None:
    grid = RankGrid(*shape)
    assert grid.cp == shape[1] * shape[2]
    assert grid.world_size == shape[0] * shape[1] * shape[2]
    for rank in range(grid.world_size):
        dp_index, ring_index, ulysses_index = grid.coordinates(rank)
        assert grid.rank(dp_index, ring_index, ulysses_index) == rank
        assert rank == (dp_index * grid.ring + ring_index) * grid.ulysses + ulysses_index
        assert grid.cp_ranks(dp_index)[grid.cp_rank(rank)] == rank
        assert grid.ring_ranks(dp_index, ulysses_index)[ring_index] == rank
    assert [r for dp in range(grid.dp) for r in grid.cp_ranks(dp)] == list(range(grid.world_size))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dp": 0, "ring": 1}, "dp=0"),
        ({"dp": 1, "ring": -2}, "ring=-2"),
        ({"dp": 1, "ring": 2, "ulysses": 1.5}, "ulysses=1.5"),
        ({"dp": True, "ring": 2}, "dp=True"),
        ({"dp": 1, "ring": 6, "window": 4}, "window=4"),
    ],
)
def test_impossible_grids_are_refused(fields: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said) as error:
        RankGrid(**fields)
    assert error.value.fix


def test_ranks_outside_the_grid_are_refused() -> None:
    grid = RankGrid(2, 3)
    for bad in (-1, 6):
        with pytest.raises(PlanError, match=f"rank={bad}"):
            grid.coordinates(bad)
    with pytest.raises(PlanError, match="ring_index=3"):
        grid.rank(0, 3)
    with pytest.raises(PlanError, match="dp_index=2"):
        grid.cp_ranks(2)
