"""Ends a process of this node by id, or looks at it, and never at another one that got the same id since.

Guarantees: the process that is killed is the one that was started at the given time: the kernel's process descriptor
holds on to it between the question and the signal (Linux 5.3). Costs two system calls and a look into /proc.
"""

import os
import signal

_SAME_START = 2.0
"""Seconds by which two readings of a start may differ (the clock is set by hand, or by NTP)."""


def kill_process(pid: int, started: float) -> bool:
    """SIGKILL.

    Args:
        pid: of the process.
        started: its `psutil.Process(pid).create_time()`.

    Returns:
        False: it is gone, or another process has its id now.

    Raises:
        PermissionError: it is another user's.
    """
    import psutil

    if pid <= 1 or pid == os.getpid():
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if abs(psutil.Process(pid).create_time() - started) > _SAME_START:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
    finally:
        os.close(handle)
    return True


def is_stopped(pid: int, started: float) -> bool:
    """Whether the process is stopped by SIGSTOP or its like: sure, where silence may be a library that holds the
    interpreter. One that a debugger holds, or that waits for a disk, is not.

    Args:
        pid: of the process.
        started: its `psutil.Process(pid).create_time()`.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) <= _SAME_START
        return same and bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
