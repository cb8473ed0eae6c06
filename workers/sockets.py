"""The TCP sockets of this process, and how to cut those that belong to gloo (Linux).

Guarantees: only established sockets are shut whose own end is a gloo listener of this process, or whose other end is a
listener that a peer published with its address: Ray's own connections in the same process are never touched, whatever
numbers their ports have; a shut socket makes every operation that waits on it fail at once, here and at the peer. gloo
has no abort call; without this, survivors of a hung peer wait for the whole group time-out.
Costs one read of /proc/self/net/tcp and one readlink per open descriptor (about a millisecond).
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LISTEN = 0x0A
_ESTABLISHED = 0x01


class Endpoint(NamedTuple):
    """One end of a connection: an IP address as text, and a port."""

    address: str
    port: int


@dataclass(frozen=True)
class TcpSocket:
    """One row of the kernel's table: both ends, state (Linux number) and inode."""

    local: Endpoint
    remote: Endpoint
    state: int
    inode: int


def listeners() -> frozenset[Endpoint]:
    """Where this process listens; a listener on all addresses has the address 0.0.0.0 or ::."""
    mine = _inodes_of_this_process()
    return frozenset(s.local for s in _tcp_table() if s.state == _LISTEN and s.inode in mine)


def shut_sockets(own: Collection[Endpoint], peers: Collection[Endpoint] = ()) -> int:
    """Shuts (both directions) this process's established sockets that belong to these listeners; returns how many.

    Args:
        own: listeners of this process, as of `listeners`: what they accepted is shut.
        peers: listeners of other processes, by the addresses that they are reached at: what connects to them is shut.
    """
    accepting, reached = frozenset(own), frozenset(peers)
    everywhere = frozenset(e.port for e in accepting if ipaddress.ip_address(e.address).is_unspecified)
    mine = _inodes_of_this_process()
    count = 0
    for entry in _tcp_table():
        if entry.state != _ESTABLISHED or entry.inode not in mine:
            continue
        accepted = entry.local in accepting or entry.local.port in everywhere
        if not accepted and entry.remote not in reached:
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
                    local=_endpoint(part[1]),
                    remote=_endpoint(part[2]),
                    state=int(part[3], 16),
                    inode=int(part[9]),
                )
            )
    return rows


def _endpoint(text: str) -> Endpoint:
    """Of the kernel's `0100007F:1F90`: 32-bit words in this machine's byte order, and a port."""
    address, port = text.rsplit(":", 1)
    words = (int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8))
    ip = ipaddress.ip_address(b"".join(words))
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return Endpoint(str(ip), int(port, 16))


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


def use_interface_of(address: str) -> None:
    """Has gloo, NCCL and HCCL, which take it from the environment only, use the interface that holds `address`. What a
    user has set there stays: on machines with several networks only they know which one is for this.
    """
    interface = interface_of(address)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        if interface is not None and not os.environ.get(name):
            os.environ[name] = interface
