"""Peak FLOP/s by the name of a device, and what the user knows better."""

import pytest

from raycp.training.peak import peak_flops


@pytest.mark.parametrize(
    ("sku", "want"),
    [
        ("Ascend910B3", 354e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("a toaster", None),
    ],
)
def test_peak_flops(sku: str, want: float | None) -> None:
    assert peak_flops(sku) == want


@pytest.mark.parametrize(
    ("own", "sku", "want"),
    [
        ("Ascend910B3=3.13e14", "Ascend910B3", 3.13e14),
        ("Ascend910B3=3.13e14", "Ascend910B2", 354e12),
        ("ascend910=3e14, H20=1e14", "Ascend910B3", 3e14),
        ("3.13e14", "Ascend910B3", 3.13e14),
        ("3.13e14", "a toaster", 3.13e14),
        ("3.13e14, H20=1e14", "NVIDIA H20", 1e14),
        ("auto", "cpu", None),
    ],
)
def test_a_user_may_know_better(own: str, sku: str, want: float | None) -> None:
    assert peak_flops(sku, own) == want
