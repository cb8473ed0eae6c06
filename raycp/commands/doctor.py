"""`raycp doctor`: what this machine has to train with, and what is missing.

Guarantees: those of `raycp.doctor`. Cost: 2-5 s; an NPU compiles the operators of the check on its first run.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Looks at this machine before a first job. Exit code 1 where something is missing."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"
    """What the job will run on. auto: what this machine has."""
    cluster: bool = False
    """Also lists the nodes of the Ray cluster (of RAY_ADDRESS, or the job's)."""

    peak_flops: str = "auto"
    """FLOP/s of a device where the table is wrong: a number, or "Ascend910B3=3.13e14"."""

    def run(self) -> int:
        """See `raycp.doctor.examine`."""
        from raycp.config import FitConfig
        from raycp.doctor import examine
        from raycp.errors import ConfigError

        if problems := FitConfig(peak_flops=self.peak_flops).problems():
            raise ConfigError.from_problems(problems)
        report = examine(self.device, cluster=self.cluster, own_peak=self.peak_flops)
        print(report.text())
        return 1 if report.problems else 0
