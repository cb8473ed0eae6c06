"""The sockets between ranks and keepers: who may speak, and in what words. No torch, no ray, no pickle.

Guarantees: nothing is read from a peer, and nothing told to it, before both have proved that they know the run's
secret (HMAC-SHA256 over fresh nonces of both, so a recorded hand-shake is worth nothing); a stranger, silent or
talking, costs one thread for `HANDSHAKE_SECONDS` and blocks nobody; a frame is JSON of a bounded length, followed by
bytes that the frame announced. What travels afterwards is not encrypted: the network of the cluster is trusted to
carry, not to ask. Costs one thread per connection and two round trips to open one.
"""

import contextlib
import hashlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raycp.errors import ClusterError, StaleGenerationError

HANDSHAKE_SECONDS = 5.0
CONNECT_SECONDS = 15.0
"""How long a member waits to be let in: it may queue behind strangers."""
FRAME_LIMIT = 1 << 26
"""Most bytes of one JSON frame: the entries of a shard of half a million tensors."""
STALL_SECONDS = 20.0
"""A transfer that has begun and moves nothing for so long is given up."""
_STRANGERS = 64
"""Connections that may be in their hand-shake at once; the next ones wait in the kernel's queue."""
_MAGIC = b"raycp-keeper-1\n"
_LENGTH = struct.Struct("<I")
_NONCE = 32
_BLOCK = 1 << 22

Buffer = memoryview | mmap.mmap | bytearray
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeeperAddress:
    """Where a keeper listens.

    Attributes:
        node_id: Ray's id of the node.
        host: address of the node in the cluster, for other nodes.
        port: TCP port there.
        unix: name of the abstract Unix socket (without the leading zero byte), for processes of the node.
    """

    node_id: str
    host: str
    port: int
    unix: str


class Connection:
    """One authenticated stream: frames, raw bytes and (on Unix sockets) file descriptors.

    Not safe for two users at once, except `close`, which frees whoever waits.

    Raises (every method):
        ConnectionError: the peer is gone, or talks nonsense.
        TimeoutError: it moved nothing for `STALL_SECONDS`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, message: Mapping[str, Any], descriptor: int | None = None) -> None:
        """Sends one frame, with a file descriptor if one is given."""
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > FRAME_LIMIT:
            raise ConnectionError(f"a message of {len(text)} bytes, the limit is {FRAME_LIMIT}")
        self._socket.settimeout(STALL_SECONDS)
        data = _LENGTH.pack(len(text)) + text
        if descriptor is None:
            self._socket.sendall(data)
        else:
            sent = socket.send_fds(self._socket, [data], [descriptor])
            self._socket.sendall(data[sent:])

    def receive(self, *, timeout: float | None = None) -> Message:
        """The next frame; waits for its first byte at most `timeout` seconds (None: for ever)."""
        message, descriptor = self.receive_with_descriptor(timeout=timeout)
        if descriptor is not None:
            os.close(descriptor)
            raise ConnectionError("a file descriptor came where none was expected")
        return message

    def receive_with_descriptor(self, *, timeout: float | None = None) -> tuple[Message, int | None]:
        """The next frame, and the descriptor that came with it, which the caller closes."""
        self._socket.settimeout(timeout)
        descriptor: int | None = None
        if self._socket.family == socket.AF_UNIX:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            descriptor = descriptors[0] if descriptors else None
        else:
            head = self._socket.recv(_LENGTH.size)
        try:
            if not head:
                raise ConnectionError("the peer closed the connection")
            self._socket.settimeout(STALL_SECONDS)
            head += self._exactly(_LENGTH.size - len(head))
            (length,) = _LENGTH.unpack(head)
            if length > FRAME_LIMIT:
                raise ConnectionError(f"a frame of {length} bytes was announced, the limit is {FRAME_LIMIT}")
            message = json.loads(self._exactly(length))
            if not isinstance(message, dict):
                raise ConnectionError(f"a frame that is no object: {message!r:.80}")
        except (ValueError, OSError) as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"a frame that is no JSON: {error}") from error
        return message, descriptor

    def ask(self, message: Mapping[str, Any], *, timeout: float | None = STALL_SECONDS) -> Message:
        """Sends a request and returns the answer.

        Raises:
            StaleGenerationError: the keeper is in a newer generation.
            ClusterError: the keeper refused, and said why.
        """
        self.send(message)
        return accepted(self.receive(timeout=timeout))

    def send_bytes(self, data: memoryview) -> None:
        """Sends raw bytes, which a frame has announced."""
        self._socket.settimeout(STALL_SECONDS)
        for start in range(0, len(data), _BLOCK):  # a time-out counts from the last block
            self._socket.sendall(data[start : start + _BLOCK])

    def send_file(self, descriptor: int, start: int, count: int) -> None:
        """Sends bytes of a file without copying them through this process."""
        self._socket.settimeout(STALL_SECONDS)
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            while count:
                sent = self._socket.sendfile(file, start, min(count, _BLOCK))
                if not sent:
                    raise ConnectionError("the file ended before what was announced")
                start, count = start + sent, count - sent

    def receive_into(self, target: memoryview, seen: Callable[[memoryview], None] | None = None) -> None:
        """Fills `target` with raw bytes; `seen` gets each piece when it is there."""
        self._socket.settimeout(STALL_SECONDS)
        at = 0
        while at < len(target):
            piece = target[at : at + _BLOCK]
            got = 0
            while got < len(piece):
                count = self._socket.recv_into(piece[got:])
                if not count:
                    raise ConnectionError("the peer closed the connection inside a transfer")
                got += count
            if seen is not None:
                seen(piece)
            at += got

    @property
    def is_open(self) -> bool:
        """Whether the peer is still there, as far as the kernel knows. The peer must not be sending."""
        try:
            self._socket.settimeout(0)
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Ends the connection, also under a thread that waits on it; idempotent."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)


def accepted(answer: Message) -> Message:
    """The answer, if it is none of refusal.

    Raises:
        StaleGenerationError: refused, for a newer generation.
        ClusterError: refused.
    """
    reason = answer.get("refused")
    if reason is None:
        return answer
    if answer.get("stale"):
        raise StaleGenerationError(str(reason), fix="this process belongs to an older world: end it")
    raise ClusterError(f"the keeper refused: {reason}", fix="see the reason")


def connect_unix(name: str, secret: bytes, *, timeout: float = CONNECT_SECONDS) -> Connection:
    """A connection to the keeper of this node.

    Raises:
        ConnectionError: nobody listens there, or not with this secret.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _opened(sock, "\0" + name, secret, timeout)


def connect_tcp(host: str, port: int, secret: bytes, *, timeout: float = CONNECT_SECONDS) -> Connection:
    """A connection to the keeper of another node; raises as `connect_unix`."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _keep_alive(sock)
    return _opened(sock, (host, port), secret, timeout)


def _opened(sock: socket.socket, address: Any, secret: bytes, timeout: float) -> Connection:
    try:
        deadline = time.monotonic() + timeout
        sock.settimeout(timeout)
        sock.connect(address)
        mine = secrets.token_bytes(_NONCE)
        theirs = _within(sock, len(_MAGIC) + _NONCE, deadline)
        if theirs[: len(_MAGIC)] != _MAGIC:
            raise ConnectionError("no keeper of this version listens there")
        nonces = theirs[len(_MAGIC) :] + mine
        sock.sendall(mine + _proof(secret, b"rank", nonces))
        if not hmac.compare_digest(_within(sock, 32, deadline), _proof(secret, b"keeper", nonces)):
            raise ConnectionError("whoever listens there does not know the run's secret")
    except BaseException:
        sock.close()
        raise
    return Connection(sock)


class Server:
    """Accepts connections on a listening socket and gives each authenticated one to `handle`, in a thread of its own.

    Args:
        listener: bound and listening; owned by the server from now on.
        secret: of the run.
        handle: runs the conversation; the connection is closed when it returns. `ConnectionError`, `TimeoutError` and
            other `OSError` from it end the conversation quietly: the peer is gone.
        name: for the threads.
    """

    def __init__(
        self, listener: socket.socket, secret: bytes, handle: Callable[[Connection], None], *, name: str
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._handle = handle
        self._name = name
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._strangers = threading.BoundedSemaphore(_STRANGERS)
        self._closed = False
        threading.Thread(target=self._accept, name=name, daemon=True).start()

    def close(self) -> None:
        """Stops listening and ends every connection; idempotent."""
        with self._lock:
            self._closed = True
            sockets = [self._listener, *self._open]
        for sock in sockets:
            with contextlib.suppress(OSError):  # already shut
                sock.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                self._strangers.release()
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors, or the peer left before it was accepted
                continue
            with self._lock:
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name=f"{self._name}-peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                known = not self._closed and self._knows_the_secret(sock)
            finally:
                self._strangers.release()
            if known:
                self._handle(Connection(sock))
        except OSError:
            pass  # the peer is gone; what it had begun is undone by whoever began it with it
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _knows_the_secret(self, sock: socket.socket) -> bool:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(sock)
        mine = secrets.token_bytes(_NONCE)
        sock.settimeout(HANDSHAKE_SECONDS)
        sock.sendall(_MAGIC + mine)
        answer = _within(sock, _NONCE + 32, deadline)
        nonces = mine + answer[:_NONCE]
        if not hmac.compare_digest(answer[_NONCE:], _proof(self._secret, b"rank", nonces)):
            return False
        sock.sendall(_proof(self._secret, b"keeper", nonces))
        return True


def listen_unix(name: str) -> socket.socket:
    """A listening abstract Unix socket: no file, gone with the process."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind("\0" + name)
    sock.listen(128)
    return sock


def listen_tcp(host: str) -> socket.socket:
    """A listening socket on one address of this machine, on a port that the kernel chooses."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.bind((host, 0))
    sock.listen(128)
    return sock


def _within(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes before the deadline, however slowly they drip."""
    data = b""
    while len(data) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no hand-shake in time")
        sock.settimeout(left)
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("refused: the secret of the run is another one, or the keeper ended")
        data += piece
    return data


def _proof(secret: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.new(secret, _MAGIC + who + nonces, hashlib.sha256).digest()


def _keep_alive(sock: socket.socket) -> None:
    """A connection to a machine that vanished ends after about half a minute of silence."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
