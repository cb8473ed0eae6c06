"""The TCP sockets of this process, and how to cut those that belong to gloo (Linux).

Guarantees: only connected sockets are shut whose own end is a gloo listener of this process, or whose other end is a
listener that a peer published with its address: Ray's own connections in the same process are never touched, whatever
numbers their ports have; a shut socket makes every operation that waits on it fail at once, here and at the peer. gloo
has no abort call; without this, survivors of a hung peer wait for the whole group time-out. Each socket is asked
itself: the table in /proc/net/tcp repeats and misses rows while other processes of the machine connect.
Costs a few system calls for each open descriptor (about a millisecond).
"""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

_CONNECTED, _LISTENING = (1, 8), (10,)  # states of a TCP socket: ESTABLISHED or CLOSE_WAIT (its peer has shut), LISTEN


class Endpoint(NamedTuple):
    """One end of a connection: an IP address as text, and a port."""

    address: str
    port: int


def listeners() -> frozenset[Endpoint]:
    """Where this process listens; a listener on all addresses has the address 0.0.0.0 or ::."""
    return frozenset(_end(one.getsockname()) for one in _sockets_of_this_process(_LISTENING))


def shut_sockets(own: Collection[Endpoint], peers: Collection[Endpoint] = ()) -> int:
    """Shuts (both directions) this process's connected sockets that belong to these listeners; returns how many.

    Args:
        own: listeners of this process, as of `listeners`: what they accepted is shut.
        peers: listeners of other processes, by the addresses that they are reached at: what connects to them is shut.
    """
    accepting, reached = frozenset(own), frozenset(peers)
    everywhere = frozenset(e.port for e in accepting if ipaddress.ip_address(e.address).is_unspecified)
    count = 0
    for one in _sockets_of_this_process(_CONNECTED):
        with contextlib.suppress(OSError):  # the peer was faster
            here = _end(one.getsockname())
            if here in accepting or here.port in everywhere or _end(one.getpeername()) in reached:
                one.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _sockets_of_this_process(states: Collection[int]) -> Iterator[socket.socket]:
    """Its TCP sockets in these states, each by a descriptor of its own, which goes as the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            handle = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the descriptor of listdir itself, or one closed meanwhile
            continue
        with handle:
            if handle.family not in (socket.AF_INET, socket.AF_INET6) or handle.type != socket.SOCK_STREAM:
                continue
            try:
                now = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            except OSError:  # a stream that is not TCP
                continue
            if now in states:
                yield handle


def _end(address: tuple[str, int]) -> Endpoint:
    """Of what the socket says: IPv4 inside IPv6 is IPv4, and an interface's scope is left out."""
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return Endpoint(str(ip), address[1])


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
