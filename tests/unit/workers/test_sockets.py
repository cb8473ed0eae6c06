"""Finding and cutting this process's own TCP connections by port."""

import socket
import subprocess
import sys

import psutil
import pytest

from workers.sockets import interface_of, listening_ports, shut_sockets


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_listening_ports_are_those_of_this_process_only() -> None:
    before = listening_ports()
    with socket.create_server(("127.0.0.1", 0)) as mine:
        other = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
                "print(s.getsockname()[1], flush=True); time.sleep(60)",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert other.stdout is not None
            theirs = int(other.stdout.readline())
            assert listening_ports() - before == {mine.getsockname()[1]}
            assert theirs not in listening_ports()
        finally:
            other.kill()
            other.communicate()


def test_a_cut_connection_wakes_both_ends_and_others_live() -> None:
    cut, kept = connected(), connected()
    try:
        assert shut_sockets([cut[0].getsockname()[1]]) == 2
        assert cut[1].recv(1) == b""
        assert cut[2].recv(1) == b""
        kept[1].sendall(b"x")
        assert kept[2].recv(1) == b"x"
        assert shut_sockets([cut[0].getsockname()[1]]) == 0, "nothing is left to cut"
    finally:
        for one in (*cut, *kept):
            one.close()


def test_no_port_cuts_nothing() -> None:
    trio = connected()
    assert shut_sockets([]) == 0
    trio[1].sendall(b"x")
    assert trio[2].recv(1) == b"x"
    for one in trio:
        one.close()


def test_the_interface_of_an_address() -> None:
    loopback = interface_of("127.0.0.1")
    assert loopback is not None
    assert loopback in psutil.net_if_addrs()
    assert interface_of("203.0.113.77") is None


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_connections_of_both_families_are_found(family: str) -> None:
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    try:
        listener = socket.create_server((family, 0), family=kind)
    except OSError:
        pytest.skip(f"this machine has no {family}")
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    assert shut_sockets([listener.getsockname()[1]]) == 2
    for one in (listener, client, server):
        one.close()
