"""Peak FLOP/s of devices, by the name that a device gives itself, and what the user knows better.

Guarantees: one table and one rule (the longest part of a name that fits counts; what the user gave comes first) for the
mfu of a run, `raycp doctor` and the cost figures. Imports no torch.
"""

from collections.abc import Mapping

from raycp.peaks import peak_table

PEAK_FLOPS: Mapping[str, float] = {
    "Ascend910B": 354e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "V100": 125e12,
}
"""Dense bf16 (V100: fp16) FLOP/s by a part of the name that the device gives itself; the longest part that fits counts.

NVIDIA: data sheets, without sparsity. Ascend910B: the figure that MindSpeed-LLM and verl count with; its SKUs differ
(910B2: 353e12 by its cores and clock, 301 to 315e12 measured; one listing says 280e12), so measure and override yours:
`FitConfig(peak_flops="Ascend910B3=3.13e14")`.
"""


def peak_flops(sku: str, own: str = "auto") -> float | None:
    """Peak FLOP/s of a device; None: neither the user nor the table has it.

    Args:
        sku: its name.
        own: `FitConfig.peak_flops`.
    """
    for table in (peak_table(own), PEAK_FLOPS):
        fitting = [part for part in table if part.lower() in sku.lower()]
        if fitting:
            return table[max(fitting, key=len)]
    return None
