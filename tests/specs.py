"""What workers are told of a run, for tests in which they need not train."""

from pathlib import Path
from typing import Any

from raycp.config import FitConfig
from raycp.plan import CostModel
from raycp.training.device import resolve_device
from raycp.training.spec import ModelSpec
from workers.messages import RunSpec, StoreSpec


def run_spec(folder: Path, **changes: Any) -> RunSpec:
    """A run on CPUs that writes to `folder`, without a model and without data."""
    nothing = StoreSpec(folder="", fingerprint="", packing="best_fit", plan_hash="")
    settings: dict[str, Any] = {
        "run_id": "run",
        "output_dir": str(folder),
        "model": ModelSpec(kind="hub", source="none"),
        "model_fingerprint": "",
        "tokenizer_folder": "",
        "device": resolve_device("cpu", {}),
        "dtype": "float32",
        "config": FitConfig(),
        "total_steps": 1,
        "cost": CostModel(),
        "train": nothing,
        "evaluation": None,
    }
    return RunSpec(**settings | changes)
