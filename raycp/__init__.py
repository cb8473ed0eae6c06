"""raycp: exact, elastic long-context fine-tuning of Hugging Face models, context-parallel on a Ray cluster.

    import raycp
    result = raycp.fit(model="folder or hub id", data="train.jsonl", output_dir="/shared/runs/one",
                       config=raycp.FitConfig(seq_length=131_072, workers=8))

Guarantees: importing this package, `raycp.config` or `raycp.plan` loads neither torch nor ray.

* api: `fit`, the one call; preflight, resolve: what is checked and filled in before it starts anything.
* config, errors, events: the configuration tree, the exception tree, the log of a run.
* plan: which tokens each rank holds and what it computes and moves (pure, numpy).
* attention: context-parallel attention that obeys a plan.
* training: model, loss, optimizer, training state, checkpoint, export.
* driver: the Ray side.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raycp.config import DataConfig, ElasticConfig, FitConfig, OptimConfig, ParallelConfig
from raycp.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DataError,
    ModelError,
    PlanError,
    RaycpError,
    WorkerError,
)
from raycp.plain_torch import import_torch

if TYPE_CHECKING:
    from raycp.api import FitResult, fit

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "ElasticConfig",
    "FitConfig",
    "FitResult",
    "ModelError",
    "OptimConfig",
    "ParallelConfig",
    "PlanError",
    "RaycpError",
    "WorkerError",
    "fit",
]

_LAZY = {"fit": "raycp.api", "FitResult": "raycp.api"}


def __getattr__(name: str) -> Any:
    """`fit` and `FitResult` bring ray and torch with them: loaded when first asked for (PEP 562)."""
    if name in _LAZY:
        _refuse_shadows()
        import_torch()
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'raycp' has no attribute {name!r}")


def _refuse_shadows() -> None:
    """Looked at before the import: an editable installation finds our modules inside a user's package of their name.

    Raises:
    ConfigError: a folder or file of the user's own has the name of one of our packages and comes first on the path.
    """
    for package, part in (("workers", "actor"), ("data_pipeline", "packing")):
        spec = find_spec(package)
        places = [] if spec is None else list(spec.submodule_search_locations or [])
        if spec is not None and not any(Path(place, f"{part}.py").exists() for place in places):
            raise ConfigError(
                f"{next(iter(places), spec.origin)} shadows raycp's package {package!r}",
                fix=f"rename it: a folder or file named {package!r} must not come before raycp on the Python path",
            )
