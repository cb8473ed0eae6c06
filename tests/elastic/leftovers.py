"""What a run may leave on a machine: processes, ports, memory; found by the mark of the fake nodes that started it.

The mark is an environment variable, which children inherit: a process is found whoever its parent is by now, and also
when its node was killed. Ray's own processes live as long as the cluster; what they hold of ours counts, too.
"""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import psutil

from tests.elastic.script import PRIVATE

SHARED_MEMORY = Path("/dev/shm")
_RAYS = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
_IMAGE = "memfd:raycp"
_SOCKET = "@raycp"


def marked(root: Path) -> Iterator[psutil.Process]:
    """All processes on this machine that nodes with a private folder below `root` have started, Ray's own included."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            home = process.environ().get(PRIVATE, "")
            if root in Path(home).parents and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def is_rays(process: psutil.Process) -> bool:
    """Whether it belongs to the cluster and not to a run."""
    words = process.cmdline()
    return not words or words[0].startswith(_RAYS) or any("/site-packages/ray/" in word for word in words[:4])


def processes(root: Path) -> list[str]:
    """Of a run: workers, keepers, the holder of its lease, its driver, and whatever these have started."""
    found = []
    for process in marked(root):
        with contextlib.suppress(psutil.Error):
            if not is_rays(process):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    return found


def ports(root: Path) -> list[str]:
    """Where processes of a run listen, and sockets of ours whoever holds them."""
    found = []
    for process in marked(root):
        with contextlib.suppress(psutil.Error):
            everything = not is_rays(process)
            found += [f"{name} of {process.pid}" for name in listening(process) if everything or name[0] == _SOCKET[0]]
    return found


def listening(process: psutil.Process) -> list[str]:
    """host:port, and names of our own local sockets."""
    inet = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    local = {str(c.laddr) for c in process.net_connections("unix")}
    return [f"{c.laddr.ip}:{c.laddr.port}" for c in inet] + sorted(n for n in local if n.startswith(_SOCKET))


def images(process: psutil.Process) -> list[str]:
    """Memory of keepers that a process has open or mapped."""
    links = []
    for link in _entries(Path(f"/proc/{process.pid}/fd")):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(link))
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return sorted({text.split("/", 1)[1] for text in (*links, *maps) if _IMAGE in text})


def memory(root: Path, *, before: Collection[str], homes: Iterable[Path]) -> list[str]:
    """Images of keepers that any marked process holds, files in /dev/shm, and files in private folders.

    Args:
        root: as above.
        before: names in /dev/shm before the run.
        homes: private folders of the nodes that live.
    """
    found = []
    for process in marked(root):
        with contextlib.suppress(psutil.Error, OSError):
            found += [f"{image} in {process.pid}" for image in images(process)]
    new = {path for path in _entries(SHARED_MEMORY) if path.name not in before}
    found += [str(path) for path in sorted(new - _of_strangers(root, new))]
    return found + [str(path) for home in homes for path in sorted(home.rglob("*")) if path.is_file()]


def shared_names() -> frozenset[str]:
    """What is in /dev/shm now."""
    return frozenset(path.name for path in _entries(SHARED_MEMORY))


def of_this_process() -> set[str]:
    """Ports and images of the calling process: compared before and after a run in it."""
    me = psutil.Process()
    return {*listening(me), *images(me)}


def _of_strangers(root: Path, files: Collection[Path]) -> set[Path]:
    """Those of the files that a process without the mark has mapped: another job's, on this machine."""
    if not files:
        return set()
    ours = {p.pid for p in marked(root)}
    found: set[Path] = set()
    for process in psutil.process_iter():
        if process.pid not in ours:
            with contextlib.suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {path for path in files if str(path) in maps}
    return found


def _entries(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended; it may end at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
