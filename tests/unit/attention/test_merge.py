import itertools

import pytest
import torch

from raycp.attention.kernels import CpuFlashKernel
from raycp.attention.merge import merge_
from raycp.plan import MaskKind, Slice


def _parts(cuts: list[int], amplitude: float = 1.0) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Attention of 5 queries over each range of 20 keys, and over all of them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 8, generator=generator) for n in (5, 20, 20))
    kernel = CpuFlashKernel()

    def part(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if start == stop:
            return torch.zeros(5, 2, 8), torch.full((5, 2), -torch.inf)
        return kernel.forward(q * amplitude, k, v, [Slice(0, 5, start, stop, MaskKind.FULL)], 1.0)

    bounds = [0, *cuts, 20]
    return [part(a, b) for a, b in itertools.pairwise(bounds)], part(0, 20)[0]


def _merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    out, lse = (x.clone() for x in parts[0])
    for part, part_lse in parts[1:]:
        merge_(out, lse, part, part_lse)
    return out


@pytest.mark.parametrize("cuts", [[7], [1, 2, 19], [0], [20], [0, 0, 5, 5, 20]])
@pytest.mark.parametrize("amplitude", [1.0, 100.0])
def test_any_cut_gives_the_whole_softmax(cuts: list[int], amplitude: float) -> None:
    parts, whole = _parts(cuts, amplitude)
    assert torch.allclose(_merged(parts), whole, rtol=0, atol=2e-6)
    assert torch.allclose(_merged(parts[::-1]), whole, rtol=0, atol=2e-6)


def test_part_without_keys_changes_no_bit() -> None:
    (first, empty), _ = _parts([20])
    out, lse = first[0].clone(), first[1].clone()
    merge_(out, lse, *empty)
    assert torch.equal(out, first[0])
    assert torch.equal(lse, first[1])
    merge_(empty[0], empty[1], *first)
    assert torch.equal(empty[0], first[0])


def test_rows_without_any_key_stay_zero() -> None:
    out, lse = torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf)
    merge_(out, lse, torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_nan_of_the_inputs_is_not_hidden() -> None:
    out, lse = torch.zeros(1, 1, 4), torch.zeros(1, 1)
    merge_(out, lse, torch.full((1, 1, 4), torch.nan), torch.full((1, 1), torch.nan))
    assert out.isnan().all()
    assert lse.isnan().all()


def test_a_lost_part_shows() -> None:
    """Planted fault: leaving one part out is far outside the tolerance."""
    parts, whole = _parts([7, 13])
    assert not torch.allclose(_merged(parts[:2]), whole, rtol=0, atol=1e-2)
