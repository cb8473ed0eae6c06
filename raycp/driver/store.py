"""The rendezvous store, which lives in the driver for the whole run.

Guarantees: it listens on one address of this machine only (the one that the cluster knows, or loopback), on a port
that the kernel chose and that nobody can take between choosing and listening; a lost worker, rank 0 included, never
takes the store away. Costs one thread.
"""

import socket

import torch.distributed as dist


def open_store(address: str) -> dist.TCPStore:
    """A TCP store that listens on `address`; its port is `store.port`."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(512)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
