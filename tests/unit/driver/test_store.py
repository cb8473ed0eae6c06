"""The rendezvous store's socket."""

import psutil

from raycp.driver.store import open_store


def listening(port: int) -> set[str]:
    """Addresses of this machine on which this process listens at a port."""
    found = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def test_the_store_listens_on_its_own_address_only_and_not_longer_than_it_lives() -> None:
    store = open_store("127.0.0.1")
    port = store.port
    assert listening(port) == {"127.0.0.1"}
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening(port) == set()
