"""Seconds of attention: what a rank and its links do, and the tables of figures for the devices that raycp runs on.

Guarantees: the same inputs give the same estimate; nothing is measured here. It is made to tell which of two plans is
better, not what a clock will show. The figures of accelerators are published or derived ones (see `TABLES`): measure
your own and pass them where the choice matters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raycp.errors import PlanError

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)

_RATES = ("flops", "band_factor", "bandwidth", "inter_bandwidth", "memory_bandwidth")
_COUNTS = ("links", "ranks_per_node", "head_dim", "value_dim", "itemsize")
_BACKWARD_FLOPS = 2.5
"""Backward of attention over forward: five products of matrices, and two."""


@dataclass(frozen=True)
class CostModel:
    """What a rank and its links do, for one layer. The defaults are one core of a server CPU, and gloo on one host.

    Args:
        flops: matrix FLOP/s that the attention kernel reaches.
        call_seconds: overhead of one forward kernel call.
        backward_call_seconds: overhead of one backward kernel call.
        one_call: the kernel takes all slices of a step in one call (variable-length kernels); else one call a slice.
        causal_block: queries and keys that the kernel masks together. It computes a diagonal of n rows as if each row
            saw half a block more: up to one block, a causal slice costs as much as a full one.
        band_factor: what an entry costs under a mask that is not a triangle (a mask tensor on CPU), over a plain one.
        bandwidth: bytes/s between two ranks of a node, each way.
        links: peers that a rank reaches at full `bandwidth` at the same time (8 cards in a full mesh: 7).
        inter_bandwidth: bytes/s of a rank to ranks of other nodes.
        ranks_per_node: consecutive ranks that share a node.
        latency: seconds that a message costs beside its bytes.
        memory_bandwidth: bytes/s of the rank's own memory: rows that kernels write and that are merged.
        linear_flops: FLOP of a layer's linear parts for one token, forward.
        head_dim: D of queries and keys.
        value_dim: D of values.
        itemsize: bytes of one number of K and V.

    Raises:
        PlanError: a figure is out of range.
    """

    flops: float = 8e10
    call_seconds: float = 33e-6
    backward_call_seconds: float = 60e-6
    one_call: bool = False
    causal_block: int = 512
    band_factor: float = 1.2
    bandwidth: float = 1.2e9
    links: int = 1
    inter_bandwidth: float = 1.2e9
    ranks_per_node: int = 64
    latency: float = 5e-5
    memory_bandwidth: float = 8e9
    linear_flops: float = 0.0
    head_dim: int = 128
    value_dim: int = 128
    itemsize: int = 4

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            whole = field.name in (*_COUNTS, "causal_block")
            low_ok = value > 0 if field.name in (*_RATES, *_COUNTS) else value >= 0
            if not low_ok or (whole and value != int(value)):
                raise PlanError(
                    f"CostModel({field.name}={value!r}) is out of range",
                    fix=f"set {field.name} to a {'whole' if whole else 'positive'} number",
                )

    @classmethod
    def named(cls, text: str, *, device: str, peaks: Mapping[str, float] | None = None) -> "CostModel":
        """The figures of a device, with changes.

        Args:
            text: "auto", or the name of a table of `TABLES`; then any number of changes, all separated by commas:
                "910b, bandwidth=5.6e10, links=1".
            device: "cpu", "cuda" or "npu": what "auto" means.
            peaks: {part of a device's name: its peak FLOP/s} where the user knows better than `PEAKS`: `flops` of a
                table scales with the one for its device, of several with the lowest. "": any device.

        Raises:
            PlanError: no such table, or no such figure.
        """
        if not isinstance(text, str):
            raise PlanError(
                f"cost figures are a {type(text).__name__}, not a string", fix="write 'auto' or a table's name"
            )
        name, *changes = (part.strip() for part in text.split(","))
        if "=" in name:
            name, changes = "auto", [name, *changes]
        table = _DEVICES.get(device, "cpu") if name == "auto" else name
        if table not in TABLES:
            raise PlanError(
                f"no cost figures are named {name!r}", fix=f"name one of auto, {', '.join(TABLES)}, or give figures"
            )
        figures = {field.name: field for field in fields(cls)}
        values: dict[str, float | int | bool] = {}
        for change in changes:
            key, _, word = (part.strip() for part in change.partition("="))
            number = _number(word)
            if key not in figures or number is None:
                raise PlanError(
                    f"{change!r} is not a figure of the cost model",
                    fix=f"write name=number, with a name of {', '.join(figures)}",
                )
            default = figures[key].default
            whole = isinstance(default, int) and not isinstance(default, bool) and number == int(number)
            values[key] = bool(number) if isinstance(default, bool) else int(number) if whole else number
        base = TABLES[table]
        if table in PEAKS:
            sku, usual = PEAKS[table]
            own = [peak for name, peak in (peaks or {}).items() if name.lower() in sku or sku in name.lower()]
            base = replace(base, flops=base.flops * min(own, default=usual) / usual)
        return replace(base, **values)  # type: ignore[arg-type]

    def on_nodes(self, ranks: Sequence[int]) -> "CostModel":
        """The figures of a placement: `ranks_per_node` is what its nodes have in common.

        Consecutive ranks of a block of that size share a node. That is the size of the nodes where all but the last are
        equal and the last is no larger, else the largest size whose blocks never lie across two nodes.

        Args:
            ranks: of each node, in the order of the ranks; nodes without any count for nothing.
        """
        held = [n for n in ranks if n > 0]
        if not held:
            return self
        block = max(held)
        if any(n != held[0] for n in held[:-1]) or held[-1] > held[0]:
            block = math.gcd(*held)
        return replace(self, ranks_per_node=block)

    def compute_seconds(self, work: Number, calls: Number, *, backward: bool = False) -> Number:
        """`work` score entries (summed over heads) in `calls` kernel calls: 2 (D + Dv) FLOP an entry forward."""
        seconds = work * (2 * (self.head_dim + self.value_dim) / self.flops)
        if backward:
            return seconds * _BACKWARD_FLOPS + calls * self.backward_call_seconds
        return seconds + calls * self.call_seconds

    def link_seconds(self, num_bytes: float, messages: float) -> float:
        """`messages` messages of `num_bytes` bytes in all, to a rank of the same node."""
        return messages * self.latency + num_bytes / self.bandwidth

    @property
    def linear_seconds(self) -> float:
        """The linear parts of a layer for one token, forward and backward."""
        return 3 * self.linear_flops / self.flops

    def smallest_ring_chunk(self, *, heads_per_kv_head: float = 1, inter: bool = False, window: int = 1) -> int:
        """Tokens that a rank must hold so that a causal ring hides its traffic (long documents; forward).

        A step of L tokens a rank computes L^2 / 2 entries of each query head, 2 (D + Dv) FLOP each, while L (D + Dv)
        numbers of each key/value head arrive: L >= itemsize x flops / bandwidth / heads_per_kv_head.

        Args:
            heads_per_kv_head: query heads to a key/value head (G); 1 without grouped heads.
            inter: the ring leaves a node.
            window: inner ring length of a double ring: a block from another node has so many steps to arrive.
        """
        bandwidth = self.inter_bandwidth * window if inter else self.bandwidth
        return -int(-self.itemsize * self.flops // (bandwidth * heads_per_kv_head))


TABLES = {
    "cpu": CostModel(),
    "910b": CostModel(
        flops=2e14,
        call_seconds=1.5e-5,
        backward_call_seconds=3e-5,
        one_call=True,
        causal_block=128,
        band_factor=1.0,
        bandwidth=2.5e10,
        links=7,
        inter_bandwidth=2e10,
        ranks_per_node=8,
        latency=2e-5,
        memory_bandwidth=1.2e12,
        itemsize=2,
    ),
    "a100": CostModel(
        flops=1.8e14,
        call_seconds=1e-5,
        backward_call_seconds=2e-5,
        one_call=True,
        causal_block=128,
        band_factor=1.0,
        bandwidth=2.3e11,
        inter_bandwidth=2.2e10,
        ranks_per_node=8,
        latency=1.2e-5,
        memory_bandwidth=1.5e12,
        itemsize=2,
    ),
    "h100": CostModel(
        flops=6e14,
        call_seconds=1e-5,
        backward_call_seconds=2e-5,
        one_call=True,
        causal_block=128,
        band_factor=1.0,
        bandwidth=3.5e11,
        inter_bandwidth=4.5e10,
        ranks_per_node=8,
        latency=1.2e-5,
        memory_bandwidth=2.5e12,
        itemsize=2,
    ),
}
"""Figures that kernels and links reach, not peaks.

cpu: measured (one core of a server with AVX-512, fp32, 8 heads of 64, slices of 2 to 1 024 rows; gloo on one host).
910b: 354 TFLOP/s bf16 peak, 56 % reached; one HCCS link of the full mesh of 8 (not verified), RoCE of 200 Gb/s between
nodes. a100, h100: NVLink as rings reach it, InfiniBand of 200 and 400 Gb/s. Latencies and call overheads of
accelerators are typical values, not measured.
"""
PEAKS = {"910b": ("ascend910b", 354e12), "a100": ("a100", 312e12), "h100": ("h100", 989e12)}
"""Device that a table is of, in its own words, and the peak FLOP/s that the table's `flops` were told from."""
_DEVICES = {"cpu": "cpu", "cuda": "h100", "npu": "910b"}


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
