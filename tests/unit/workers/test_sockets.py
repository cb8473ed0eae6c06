"""Finding and cutting this process's own TCP connections by the listeners that they belong to."""

import os
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from workers.sockets import Endpoint, interface_of, listeners, shut_sockets, use_interface_of


def end_of(listener: socket.socket) -> Endpoint:
    return Endpoint(*listener.getsockname()[:2])


def connected(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server((address, 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    return listener, client, server


def test_listeners_are_those_of_this_process_only() -> None:
    before = listeners()
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
            assert listeners() - before == {end_of(mine)}
            assert theirs not in {e.port for e in listeners()}
        finally:
            other.kill()
            other.communicate()


def test_a_cut_connection_wakes_both_ends_and_others_live() -> None:
    cut, kept = connected(), connected()
    try:
        assert shut_sockets([end_of(cut[0])], [end_of(cut[0])]) == 2
        assert cut[1].recv(1) == b""
        assert cut[2].recv(1) == b""
        kept[1].sendall(b"x")
        assert kept[2].recv(1) == b"x"
        assert shut_sockets([end_of(cut[0])], [end_of(cut[0])]) == 0, "nothing is left to cut"
    finally:
        for one in (*cut, *kept):
            one.close()


def test_a_connection_of_ray_whose_port_has_the_number_of_a_peers_listener_elsewhere_is_not_cut() -> None:
    """Only ports were published, without addresses, and compared with both ends of every connection."""
    raylet, ours, _ = trio = connected()
    peer = Endpoint("203.0.113.77", ours.getsockname()[1])
    assert shut_sockets([], [peer]) == 0
    ours.sendall(b"x")
    assert trio[2].recv(1) == b"x"
    assert shut_sockets([], [peer._replace(address="127.0.0.1", port=raylet.getsockname()[1])]) == 1
    for one in trio:
        one.close()


def test_of_a_connection_to_a_peer_either_end_alone_is_found() -> None:
    for own, peers in ((True, False), (False, True)):
        listener, client, server = connected()
        here = [end_of(listener)]
        assert shut_sockets(here if own else [], here if peers else []) == 1
        assert (client.recv(1), server.recv(1)) == (b"", b"")
        for one in (listener, client, server):
            one.close()


def test_what_a_listener_on_all_addresses_accepted_is_cut() -> None:
    listener = socket.create_server(("0.0.0.0", 0))
    client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
    server, _ = listener.accept()
    assert shut_sockets([end_of(listener)]) == 1
    for one in (listener, client, server):
        one.close()


def test_every_connection_is_found_and_once_while_others_come_and_go() -> None:
    """The kernel's table of all connections was read in pieces: it repeated some of them, and missed others."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            for one in [end for _ in range(20) for end in connected()]:
                one.close()

    others = [threading.Thread(target=churn) for _ in range(2)]
    for other in others:
        other.start()
    try:
        found = []
        for _ in range(200):
            trio = connected("127.0.0.9")
            assert end_of(trio[0]) in listeners()
            found.append(shut_sockets([], [end_of(trio[0])]))
            for one in trio:
                one.close()
    finally:
        over.set()
        for other in others:
            other.join()
    assert found == [1] * 200


def test_a_connection_over_ipv6_is_cut() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        client = socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        server, _ = listener.accept()
        with client, server:
            assert Endpoint("::", listener.getsockname()[1]) in listeners()
            assert shut_sockets([], [Endpoint("127.0.0.1", listener.getsockname()[1])]) == 1
            assert server.recv(1) == b""


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


def test_an_interface_that_the_user_has_chosen_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was overwritten with the interface that Ray uses: often the slow network for management."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface_of("127.0.0.1")
    assert [os.environ[name] for name in names] == [interface_of("127.0.0.1"), "ib0", interface_of("127.0.0.1")]


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_connections_of_both_families_are_found(family: str) -> None:
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    try:
        listener = socket.create_server((family, 0), family=kind)
    except OSError:
        pytest.skip(f"this machine has no {family}")
    client = socket.create_connection(listener.getsockname()[:2])
    server, _ = listener.accept()
    assert shut_sockets([end_of(listener)], [end_of(listener)]) == 2
    for one in (listener, client, server):
        one.close()
