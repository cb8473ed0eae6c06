"""torch on a machine where torch_npu is installed and CANN is not: there, `import torch` fails, and transformers too.

torch loads torch_npu by itself, and transformers imports it to ask for devices. Guarantees: neither happens before ours
does, in a process that cannot have an NPU because the machine has none (no /dev/davinci*); on a machine that has some,
torch loads plain, and a process that was given an NPU imports torch_npu by name (`raycp.training.device`). What the
user set in TORCH_DEVICE_BACKEND_AUTOLOAD, or has imported already, is left as it is, and no variable stays behind.
Costs the import of torch, 1 s, where it is needed anyway.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch() -> None:
    """Imports torch; does nothing where it is there."""
    if "torch" in sys.modules:
        return
    ours = AUTOLOAD not in os.environ
    if ours:
        os.environ[AUTOLOAD] = "0"
        if importlib.util.find_spec("torch_npu") is not None and not any(Path("/dev").glob("davinci[0-9]*")):
            sys.modules["torch_npu"] = None  # type: ignore[assignment]  # Python's own way to say: not here
    try:
        importlib.import_module("torch")
    finally:
        if ours:
            del os.environ[AUTOLOAD]
