"""torch where torch_npu is installed and CANN is not: there, `import torch` fails, and transformers too.

torch loads torch_npu by itself, and transformers imports it to ask for devices. Guarantees: neither happens in a
process that cannot have an NPU, because the machine has none (no /dev/davinci*) or the process was given none; in one
that has some, torch loads plain, and a process that was given an NPU imports torch_npu by name
(`raycp.training.device`). A user who set TORCH_DEVICE_BACKEND_AUTOLOAD to anything but 0, or has imported torch
already, is left alone, and no variable stays behind. Costs the import of torch, 1 s, where it is needed anyway.
"""

import importlib
import importlib.util
import os
import sys
from pathlib import Path

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_torch(*, npu: bool = True, devices: Path = Path("/dev")) -> None:
    """Imports torch; does nothing where it is there.

    Args:
        npu: False: this process was given no NPU, whatever the machine has.
        devices: folder of the device files.
    """
    if "torch" in sys.modules:
        return
    before = os.environ.get(AUTOLOAD)
    if before in (None, "0"):
        os.environ[AUTOLOAD] = "0"
        if importlib.util.find_spec("torch_npu") is not None and not (npu and any(devices.glob("davinci[0-9]*"))):
            sys.modules["torch_npu"] = None  # type: ignore[assignment]  # Python's own way to say: not here
    try:
        importlib.import_module("torch")
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)
