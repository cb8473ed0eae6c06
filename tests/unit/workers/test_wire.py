"""Who may speak to a keeper, and what becomes of those who may not."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycp.errors import ClusterError, StaleGenerationError
from tests.snapshots import SECRET
from workers import wire
from workers.wire import (
    Connection,
    Server,
    accepted,
    connect_tcp,
    connect_unix,
    listen_tcp,
    listen_unix,
)

SHORT = 0.5


def echo(connection: Connection) -> None:
    while True:
        connection.send(connection.receive())


class Keeper:
    """A server on both kinds of socket."""

    def __init__(self, secret: bytes = SECRET) -> None:
        self.name = f"raycp-test-{os.getpid()}-{id(self)}"
        tcp = listen_tcp("127.0.0.1")
        self.port = int(tcp.getsockname()[1])
        self.handled: list[Connection] = []
        self.servers = [Server(s, secret, self.handle, name="test") for s in (tcp, listen_unix(self.name))]

    def handle(self, connection: Connection) -> None:
        self.handled.append(connection)
        echo(connection)

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", SHORT)
    made = Keeper()
    yield made
    made.close()


def test_frames_and_bytes_go_both_ways_on_both_kinds_of_socket(keeper: Keeper) -> None:
    for connection in (connect_tcp("127.0.0.1", keeper.port, SECRET), connect_unix(keeper.name, SECRET)):
        for size in (0, 1, 70_000):
            assert connection.ask({"text": "x" * size, "n": size}) == {"text": "x" * size, "n": size}
        connection.close()


def test_a_wrong_secret_is_refused_and_no_request_of_it_is_read(keeper: Keeper) -> None:
    for connect in (lambda s: connect_tcp("127.0.0.1", keeper.port, s), lambda s: connect_unix(keeper.name, s)):
        for secret in (b"", SECRET[:-1], SECRET + b"x"):
            with pytest.raises(ConnectionError, match="secret"):
                connect(secret)
    assert keeper.handled == []


def test_planted_fault_a_server_that_asks_for_no_proof_serves_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    def trusting(self: Server, sock: socket.socket) -> bool:
        return True

    monkeypatch.setattr(Server, "_knows_the_secret", trusting)
    open_door = Keeper()
    stranger = open_door.stranger()
    text = json.dumps({"hello": 1}).encode()
    stranger.sendall(struct.pack("<I", len(text)) + text)
    assert stranger.recv(100)  # the test above would be red
    open_door.close()


def test_a_listener_that_does_not_know_the_secret_is_told_nothing() -> None:
    impostor = Keeper(secret=b"another")
    with pytest.raises(ConnectionError):
        connect_tcp("127.0.0.1", impostor.port, SECRET)
    impostor.close()
    server = listen_tcp("127.0.0.1")  # one that repeats what it hears
    heard: list[bytes] = []

    def parrot() -> None:
        sock, _ = server.accept()
        nonce = wire._MAGIC + b"n" * 32
        sock.sendall(nonce)
        heard.append(sock.recv(1000))
        sock.sendall(heard[0][-32:])  # the client's own proof back
        sock.close()

    thread = threading.Thread(target=parrot)
    thread.start()
    with pytest.raises(ConnectionError, match="does not know the run's secret"):
        connect_tcp("127.0.0.1", server.getsockname()[1], SECRET)
    thread.join()
    assert SECRET not in heard[0]
    server.close()


def test_a_recorded_hand_shake_is_worth_nothing(keeper: Keeper) -> None:
    relay = listen_tcp("127.0.0.1")
    recorded: list[bytes] = []

    def tap() -> None:
        client, _ = relay.accept()
        real = keeper.stranger()
        client.sendall(real.recv(1000))
        recorded.append(client.recv(1000))
        real.sendall(recorded[0])
        client.sendall(real.recv(1000))
        client.close()
        real.close()

    thread = threading.Thread(target=tap)
    thread.start()
    connect_tcp("127.0.0.1", relay.getsockname()[1], SECRET).close()
    thread.join()
    relay.close()
    deadline = time.monotonic() + 20.0
    while not keeper.handled and time.monotonic() < deadline:  # its thread begins a moment later
        time.sleep(0.01)
    keeper.handled.clear()
    replay = keeper.stranger()
    replay.recv(1000)
    replay.sendall(recorded[0])
    assert replay.recv(1000) == b""
    assert keeper.handled == []


def test_a_silent_stranger_blocks_nobody_and_is_cut_off(keeper: Keeper) -> None:
    silent = [keeper.stranger() for _ in range(20)]
    began = time.monotonic()
    connection = connect_tcp("127.0.0.1", keeper.port, SECRET)
    assert connection.ask({"a": 1}) == {"a": 1}
    assert time.monotonic() - began < SHORT
    for sock in silent:
        sock.settimeout(5)
        while sock.recv(1000):  # the nonce, then the end
            pass
    assert time.monotonic() - began < 5
    assert len(keeper.handled) == 1


def test_a_stranger_that_drips_bytes_is_cut_off_in_the_same_time(keeper: Keeper) -> None:
    sock = keeper.stranger()
    began = time.monotonic()

    def drip() -> None:
        while time.monotonic() - began < 5:
            sock.sendall(b"x")
            time.sleep(0.1)

    with pytest.raises(ConnectionError):
        drip()
    assert time.monotonic() - began < 3
    assert keeper.handled == []


def test_more_strangers_than_places_leave_room_for_members_soon(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [keeper.stranger() for _ in range(wire._STRANGERS + 20)]
    connection = connect_tcp("127.0.0.1", keeper.port, SECRET, timeout=5)
    assert connection.ask({"a": 1}) == {"a": 1}
    for sock in silent:
        sock.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", wire.FRAME_LIMIT + 1),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 4) + b"[1]x",
        struct.pack("<I", 3) + b"[1]",
        struct.pack("<I", 2) + b"\xff\xfe",
    ],
    ids=["too long", "longest", "no json", "no object", "no text"],
)
def test_a_frame_that_makes_no_sense_ends_the_connection_only(keeper: Keeper, data: bytes) -> None:
    connection = connect_tcp("127.0.0.1", keeper.port, SECRET)
    connection._socket.sendall(data)
    with pytest.raises(ConnectionError):
        connection.receive(timeout=5)
    other = connect_tcp("127.0.0.1", keeper.port, SECRET)
    assert other.ask({"a": 1}) == {"a": 1}


def test_a_message_over_the_limit_is_not_sent(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connect_tcp("127.0.0.1", keeper.port, SECRET)
    monkeypatch.setattr(wire, "FRAME_LIMIT", 100)
    with pytest.raises(ConnectionError, match="the limit is 100"):
        connection.send({"text": "x" * 100})


def test_descriptors_travel_with_a_frame_and_only_where_expected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    name = f"raycp-test-fd-{os.getpid()}"

    def give(connection: Connection) -> None:
        while True:
            connection.receive()
            with path.open("rb") as file:
                connection.send({"here": "x" * 100_000}, file.fileno())

    server = Server(listen_unix(name), SECRET, give, name="test")
    connection = connect_unix(name, SECRET)
    connection.send({})
    message, descriptor = connection.receive_with_descriptor(timeout=5)
    assert len(message["here"]) == 100_000
    assert descriptor is not None
    assert os.pread(descriptor, 4, 3) == b"3456"
    os.close(descriptor)
    connection.send({})
    with pytest.raises(ConnectionError, match="none was expected"):
        connection.receive(timeout=5)
    server.close()


def test_files_and_memory_arrive_whole(tmp_path: Path) -> None:
    path, size = tmp_path / "file", (9 << 20) + 17
    content = os.urandom(size)
    path.write_bytes(content)
    got: list[bytes] = []

    def take(connection: Connection) -> None:
        for start in (0, 5):
            target = bytearray(size - start)
            pieces: list[int] = []
            connection.receive_into(memoryview(target), lambda piece, p=pieces: p.append(len(piece)))
            assert sum(pieces) == size - start
            got.append(bytes(target))
        connection.send({"done": True})
        connection.receive_into(memoryview(bytearray(size + 1)))

    listener = listen_tcp("127.0.0.1")
    server = Server(listener, SECRET, take, name="test")
    connection = connect_tcp("127.0.0.1", listener.getsockname()[1], SECRET)
    with path.open("rb") as file:
        connection.send_file(file.fileno(), 0, size)
    connection.send_bytes(memoryview(content)[5:])
    assert connection.receive(timeout=10) == {"done": True}
    assert got == [content, content[5:]]
    with path.open("rb") as file, pytest.raises(ConnectionError, match="the file ended"):
        connection.send_file(file.fileno(), 0, size + 1)
    server.close()


def test_closing_frees_whoever_waits(keeper: Keeper) -> None:
    connection = connect_unix(keeper.name, SECRET)
    assert connection.is_open
    threading.Timer(0.2, keeper.close).start()
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        connection.receive(timeout=10)
    assert time.monotonic() - began < 5
    assert not connection.is_open
    with pytest.raises(OSError, match=r"."):
        connect_unix(keeper.name, SECRET)
    own = connect_tcp("127.0.0.1", Keeper().port, SECRET)
    threading.Timer(0.2, own.close).start()
    with pytest.raises(OSError, match=r"."):
        own.receive(timeout=10)


def test_a_waiting_time_ends_without_losing_the_stream(keeper: Keeper) -> None:
    connection = connect_tcp("127.0.0.1", keeper.port, SECRET)
    with pytest.raises(TimeoutError):
        connection.receive(timeout=0.05)
    assert connection.ask({"a": 1}) == {"a": 1}


def test_refusals_are_errors_of_two_kinds() -> None:
    assert accepted({"ok": True}) == {"ok": True}
    with pytest.raises(ClusterError, match="the keeper refused: full"):
        accepted({"refused": "full"})
    with pytest.raises(StaleGenerationError, match="old"):
        accepted({"refused": "old", "stale": True})
