import pytest

from raycp.errors import PlanError
from raycp.plan import MaskKind, Range, Slice


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (3, 2), (-1, 4)])
def test_empty_or_negative_range_is_refused(start: int, stop: int) -> None:
    with pytest.raises(PlanError, match="holds no row"):
        Range(start, stop)


def test_length_of_a_range() -> None:
    assert len(Range(2, 7)) == 5


@pytest.mark.parametrize("bounds", [(0, 0, 0, 1), (0, 1, 4, 4), (-1, 1, 0, 1), (2, 1, 0, 1)])
def test_slice_with_an_empty_side_is_refused(bounds: tuple[int, int, int, int]) -> None:
    with pytest.raises(PlanError, match="empty or negative"):
        Slice(*bounds, MaskKind.FULL)


@pytest.mark.parametrize("kind", [MaskKind.CAUSAL, MaskKind.DIAGONAL])
def test_causal_and_diagonal_slices_must_be_square(kind: MaskKind) -> None:
    with pytest.raises(PlanError, match="not square"):
        Slice(0, 2, 0, 3, kind)


@pytest.mark.parametrize("bounds", [(3, 2), (-9, -1), (2, 9)])
def test_band_in_which_a_query_sees_no_key_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="sees no key"):
        Slice(0, 4, 0, 5, MaskKind.BAND, *bounds)


def test_area_counts_visible_entries() -> None:
    assert Slice(0, 4, 2, 6, MaskKind.CAUSAL).area == 10
    assert Slice(0, 4, 2, 5, MaskKind.FULL).area == 12
    assert Slice(0, 4, 2, 6, MaskKind.DIAGONAL).area == 4
