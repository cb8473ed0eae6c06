"""Answers worked out by hand from the op's document; they guard the CPU kernel, and mutants of it must fail them.

With all scores 0 the softmax of a row is uniform over the keys it sees: its sum is their number, its maximum 0, and its
output their mean. Values 1, 2, 4, 8, ... make the mean tell which keys those were.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from raycp.attention.merge import merge_
from tests.device.inside.documented_op import DocumentedOp
from tests.device.inside.world import ops, version

TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def seen(q_ends: list[int], k_ends: list[int], mode: int, before: int = 2**31 - 1, after: int = 2**31 - 1) -> list[str]:
    """For each query, the keys of its document that it sees ("0134"), read out of the op's results."""
    powers = torch.tensor([2.0 ** (i % 16) for i in range(k_ends[-1])])
    starts = [0, *k_ends[:-1]]
    for start in starts:
        powers[start:] = torch.tensor([2.0**i for i in range(k_ends[-1] - start)])
    q, k, v = torch.zeros(q_ends[-1], 1, 16), torch.zeros(k_ends[-1], 1, 16), powers[:, None, None].expand(-1, 1, 16)
    mask = None if mode == 0 else TRIANGLE
    out, top, total, *_ = ops().npu_fusion_attention(
        q, k, v.contiguous(), 1, "TND", atten_mask=mask, sparse_mode=mode, pre_tockens=before, next_tockens=after,
        actual_seq_qlen=q_ends, actual_seq_kvlen=k_ends, softmax_layout="TND",
    )  # fmt: skip
    assert (top == 0).all()
    sums = (out[:, 0, 0] * total[:, 0, 0]).round().int().tolist()
    return ["".join(str(i) for i in range(16) if bits >> i & 1) for bits in sums]


# Lengths 2, 5, 4 against 6, 5, 4: "card 2" of the document's picture of a mask that is cut along the queries.
RIGHT_DOWN = ["01234", "012345", "0", "01", "012", "0123", "01234", "0", "01", "012", "0123"]
GOLDEN: dict[str, tuple[Callable[[], Any], Any]] = {
    "mode 3 is told from the last key": (lambda: seen([2, 7, 11], [6, 11, 15], 3), RIGHT_DOWN),
    "mode 2 is told from the first key": (lambda: seen([3, 5], [3, 7], 2), ["0", "01", "012", "0", "01"]),
    "mode 0 without a mask sees all": (lambda: seen([2, 3], [3, 5], 0), ["012", "012", "01"]),
    "mode 4 is a band from the last key": (
        lambda: seen([3], [5], 4, before=1, after=1),
        ["123", "234", "34"],
    ),
    "mode 4 looks back only": (
        lambda: seen([2, 6], [2, 6], 4, before=2, after=0),
        ["0", "01", "0", "01", "012", "123"],
    ),
    "the band of the document's picture of mode 7, as mode 4 of one document": (
        lambda: seen([2], [6], 4, before=6, after=-2),
        ["012", "0123"],
    ),
    "an empty document repeats its end": (lambda: seen([2, 4, 4, 6], [2, 4, 4, 6], 3), ["0", "01"] * 3),
    "statistics by rows": (lambda: _statistics("TND"), [0, 10, 1, 11, 2, 12]),
    "statistics by heads of documents": (lambda: _statistics(""), [0, 10, 1, 2, 11, 12]),
    "gradients": (
        lambda: _gradients(),
        [0.75 * math.log(3), -0.75, 0.75, 0.25, 0.75],
    ),
    "gradients from (lse, 1)": (
        lambda: _gradients(lse=True),
        [0.75 * math.log(3), -0.75, 0.75, 0.25, 0.75],
    ),
}


def _statistics(layout: str) -> list[int]:
    """Documents of 1 and 2 rows, 2 heads; each row has one key, with score row + 10 head: the flat order of the max."""
    q = torch.zeros(3, 2, 16)
    q[:, :, 0] = torch.tensor([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]])
    k = torch.zeros(2, 1, 16)
    k[:, :, 0] = 1.0
    _, top, total, *_ = ops().npu_fusion_attention(
        q, k, k, 2, "TND", actual_seq_qlen=[1, 3], actual_seq_kvlen=[1, 2], softmax_layout=layout
    )
    assert (total == 1).all()
    assert (top == top[..., :1]).all()
    return [int(x) for x in top[..., 0].reshape(-1).tolist()]


def _gradients(*, lse: bool = False) -> list[float]:
    """One query 1 against keys 0 and ln 3, values 0 and 4: p = 1/4, 3/4, out = 3; dout = 1.

    dv = p; dp = 0, 4; ds = p (dp - 3) = -3/4, 3/4; dq = 3/4 ln 3; dk = ds.
    """
    pad = torch.zeros(1, 1, 15)
    q = torch.cat([torch.ones(1, 1, 1), pad], 2)
    k = torch.cat([torch.tensor([0.0, math.log(3)]).view(2, 1, 1), pad.expand(2, 1, 15)], 2)
    v = torch.cat([torch.tensor([0.0, 4.0]).view(2, 1, 1), pad.expand(2, 1, 15)], 2)
    lists = {"actual_seq_qlen": [1], "actual_seq_kvlen": [2], "softmax_layout": "TND"}
    out, top, total, *_ = ops().npu_fusion_attention(q, k, v, 1, "TND", **lists)
    assert float(out[0, 0, 0]) == pytest.approx(3.0)
    if lse:
        top, total = top + total.log(), torch.ones_like(total)
    dq, dk, dv, *_ = ops().npu_fusion_attention_grad(
        q, k, v, q, 1, "TND", softmax_max=top, softmax_sum=total, attention_in=out, **lists
    )
    return [float(x) for x in (dq[0, 0, 0], *dk[:, 0, 0], *dv[:, 0, 0])]


def failures() -> list[str]:
    """The golden answers that the installed kernel does not give."""
    found = []
    for name, (ask, wanted) in GOLDEN.items():
        try:
            answer = ask()
        except (AssertionError, RuntimeError) as error:
            found.append(f"{name}: {error}")
            continue
        close = pytest.approx(wanted, rel=1e-5) if isinstance(wanted[0], float) else wanted
        if answer != close:
            found.append(f"{name}: {answer}")
    return found


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden(name: str) -> None:
    ask, wanted = GOLDEN[name]
    assert ask() == (pytest.approx(wanted, rel=1e-5) if isinstance(wanted[0], float) else wanted)


def test_statistics_by_heads_over_all_documents() -> None:
    with version(DocumentedOp(default_order="heads")):
        assert _statistics("") == [0, 1, 2, 10, 11, 12]


def test_documents_at_the_end_may_take_no_part() -> None:
    q = torch.ones(5, 1, 16)
    out, *_ = ops().npu_fusion_attention(q, q, q, 1, "TND", actual_seq_qlen=[2, 0, 0], actual_seq_kvlen=[2, 0, 0])
    assert out[:, 0, 0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("lists", "match"),
    [
        (([4], [5]), "lists end at 4"),
        (([5], [2, 5]), "of one size"),
        ((list(range(1, 1026)), list(range(1, 1026))), "at most 1K"),
    ],
)
def test_lists_that_the_document_rules_out(lists: tuple[list[int], list[int]], match: str) -> None:
    q = torch.ones(5, 1, 16)
    with pytest.raises(RuntimeError, match=match):
        ops().npu_fusion_attention(q, q, q, 1, "TND", actual_seq_qlen=lists[0], actual_seq_kvlen=lists[1])


def test_the_fused_merge_is_ours() -> None:
    generator = torch.Generator().manual_seed(5)
    outs = [torch.randn(7, 3, 16, generator=generator) for _ in range(2)]
    stats = [(torch.randn(7, 3, generator=generator), torch.rand(7, 3, generator=generator) + 1) for _ in range(2)]
    wide = [(a[..., None].repeat(1, 1, 8), b[..., None].repeat(1, 1, 8)) for a, b in stats]
    lengths = torch.tensor([0, 3, 7])
    out, top, total = ops().npu_ring_attention_update(
        outs[0], *wide[0], outs[1], *wide[1], actual_seq_qlen=lengths, input_layout="TND", input_softmax_layout="TND"
    )
    lse, part_lse = (a + b.log() for a, b in stats)
    merge_(outs[0], lse, outs[1], part_lse)
    assert torch.allclose(outs[0], out, atol=1e-6)
    assert torch.allclose(lse, top[..., 0] + total[..., 0].log(), atol=1e-6)


@dataclass
class _Mutant(DocumentedOp):
    """A CPU kernel with one thing wrong."""

    wrong: str = ""

    def _visible(self, rows: slice, cols: slice, mask: Any, mode: int, *band: int) -> torch.Tensor:
        if self.wrong == "no mask":
            mask = None
        if self.wrong == "mode 2 for 3" and mode == 3:
            mode = 2
        if self.wrong == "mode 4 from the first key" and mode == 4:
            shift = (cols.stop - cols.start) - (rows.stop - rows.start)
            band = (band[0] - shift, band[1] + shift)
        return super()._visible(rows, cols, mask, mode, *band)

    def _to_order(self, x: torch.Tensor, lengths: Any, layout: str) -> torch.Tensor:
        if self.wrong == "head-major statistics for token-major":
            layout = "TND" if layout == "" else ""
        return super()._to_order(x, lengths, layout)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, top, total, *rest = super().forward(*args, **kwargs)
        if self.wrong == "max and sum swapped":
            top, total = total, top
        return out, top, total, *rest

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        if self.wrong == "gradient without the output":
            kwargs["attention_in"] = torch.zeros_like(kwargs["attention_in"])
        return super().backward(*args, **kwargs)


MUTANTS = (
    "head-major statistics for token-major",
    "mode 2 for 3",
    "mode 4 from the first key",
    "no mask",
    "max and sum swapped",
    "gradient without the output",
)


@pytest.mark.parametrize("wrong", MUTANTS)
def test_each_mutant_of_the_cpu_kernel_fails_a_golden_answer(wrong: str) -> None:
    with version(_Mutant(wrong="")):
        assert failures() == []
    with version(_Mutant(wrong=wrong)):
        assert failures() != []
