"""The TCP sockets of this process, and how to cut those that belong to gloo (Linux).

Guarantees: only established sockets whose local or remote port is a published gloo port are shut, so Ray's own
connections in the same process are never touched; a shut socket makes every operation that waits on it fail at once,
here and at the peer. gloo has no abort call; without this, survivors of a hung peer wait for the whole group time-out.
Costs one read of /proc/self/net/tcp and one readlink per open descriptor (about a millisecond).
"""

import os
import socket
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_LISTEN = 0x0A
_ESTABLISHED = 0x01


@dataclass(frozen=True)
class TcpSocket:
    """One row of the kernel's table: ports, state (Linux number) and inode."""

    local_port: int
    remote_port: int
    state: int
    inode: int


def listening_ports() -> frozenset[int]:
    """Ports on which this process listens."""
    mine = _inodes_of_this_process()
    return frozenset(s.local_port for s in _tcp_table() if s.state == _LISTEN and s.inode in mine)


def shut_sockets(ports: Collection[int]) -> int:
    """Shuts (both directions) this process's established sockets that use one of `ports`; returns how many."""
    wanted = frozenset(ports)
    mine = _inodes_of_this_process()
    count = 0
    for entry in _tcp_table():
        if entry.state != _ESTABLISHED or entry.inode not in mine:
            continue
        if entry.local_port not in wanted and entry.remote_port not in wanted:
            continue
        try:
            handle = socket.socket(fileno=os.dup(mine[entry.inode]))
        except OSError:  # closed since the table was read: nothing left to shut
            continue
        with handle:
            try:
                handle.shutdown(socket.SHUT_RDWR)
                count += 1
            except OSError:  # the peer was faster
                continue
    return count


def _tcp_table() -> list[TcpSocket]:
    rows = []
    for name in ("tcp", "tcp6"):
        table = Path("/proc/self/net") / name
        if not table.exists():
            continue
        for line in table.read_text().splitlines()[1:]:
            part = line.split()
            rows.append(
                TcpSocket(
                    local_port=int(part[1].rsplit(":", 1)[1], 16),
                    remote_port=int(part[2].rsplit(":", 1)[1], 16),
                    state=int(part[3], 16),
                    inode=int(part[9]),
                )
            )
    return rows


def _inodes_of_this_process() -> dict[int, int]:
    """{socket inode: file descriptor}."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of listdir itself, or one closed meanwhile
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(name)
    return found


def interface_of(address: str) -> str | None:
    """Name of the network interface that holds the IPv4 `address`, or None if no interface does."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address == address for a in addresses):
            return str(name)
    return None
