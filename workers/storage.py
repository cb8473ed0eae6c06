"""What a file system that fails means, in words that say what to change; whether a folder is the driver's.

Guarantees: an `OSError` of a full, read-only, vanished or forbidden file system is told from other ones (time-outs,
broken connections) by its number alone, the same way in the driver and in a worker.
"""

import errno
import time
from pathlib import Path

_FIXES = {
    errno.ENOSPC: "free space there, or give an output_dir with more; then run the same command again to continue",
    errno.EDQUOT: "free some of your quota there, or give another output_dir; then run the same command again",
    errno.EFBIG: "give an output_dir on a file system that takes files of this size",
    errno.EROFS: "mount it for writing, or give an output_dir that can be written",
    errno.EACCES: "grant write permission there, or give an output_dir that can be written",
    errno.EPERM: "grant write permission there, or give an output_dir that can be written",
    errno.EIO: "check the storage; then run the same command again to continue",
    errno.ETIMEDOUT: "look whether the storage answers (a mount whose server is away?), and how fast it is",
    errno.ESTALE: "check the mount of the storage; then run the same command again to continue",
}


def storage_fix(error: BaseException) -> str:
    """What to change about the file system that raised `error`; "" if no file system did."""
    return _FIXES.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def shared_folder_problems(nonce_path: str, nonce: str) -> list[tuple[str, str]]:
    """(message, fix), unless the file that the driver wrote is here within 10 s, and holds what it wrote."""
    path = Path(nonce_path)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        if path.exists():
            found = path.read_text()
            if found == nonce:
                return []
        time.sleep(0.25)
    folder = path.parent.parent
    return [
        (
            f"output_dir {folder} is not the driver's folder there: the file {path.name} that the driver wrote "
            + ("has other content" if path.exists() else "is missing"),
            "give an output_dir on storage that all nodes share (NFS, Lustre, a mounted bucket)",
        )
    ]
