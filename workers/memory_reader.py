"""Reads training state out of the keepers' memory, whatever world it was written by.

Guarantees: the rows are those of the manifest's step, bit for bit what a checkpoint of it would give (a keeper
compares an image with its checksum before it serves it); a holder that is lost, damaged or no longer has the step is
passed over, and the next one is asked; only when none is left is it an error. Costs: the bytes that are asked for, over
a Unix socket from the own node and TCP from another, and one round trip for each tensor and shard.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raycp.errors import CheckpointError, ClusterError, StaleGenerationError
from raycp.training.manifest import Manifest, ShardRecord
from raycp.training.rows import RowReader
from workers.wire import Connection, KeeperAddress, connect_tcp, connect_unix

READ_SECONDS = 120.0
"""A holder that gives nothing for so long is passed over; before its first answer it compares a checksum."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """A step that the keepers hold whole.

    Attributes:
        manifest: of the step; of one that was complete but never committed, `extra` and `cursor` are empty.
        holders: by shard file: the keepers that have it.
    """

    manifest: Manifest
    holders: dict[str, list[KeeperAddress]]

    @property
    def homes(self) -> int:
        """How many keepers have the shard that the fewest have."""
        return min((len(set(keepers)) for keepers in self.holders.values()), default=0)


class MemoryReader(RowReader):
    """Reads rows of a step that keepers hold; `read` as that of `CheckpointReader`.

    Args:
        manifest: of the step.
        holders: by shard file: the keepers that have it.
        secret: of the run.
        near: own node id: its keeper is asked first, over a Unix socket.
        on_wait: called whenever a keeper is waited for from now on.
        on_piece: called whenever bytes have come.

    Raises (`read`):
        CheckpointError: no such tensor or rows, or no holder could give them.
    """

    def __init__(
        self,
        manifest: Manifest,
        holders: Mapping[str, Sequence[KeeperAddress]],
        *,
        secret: bytes,
        near: str,
        on_wait: Callable[[], None] = lambda: None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(manifest, self._from_keepers, title=f"step {manifest.step} in memory", on_piece=on_piece)
        self._on_wait = on_wait
        self._holders = {
            file: sorted(addresses, key=lambda a: a.node_id != near) for file, addresses in holders.items()
        }
        self._secret = secret
        self._near = near
        self._connections: dict[KeeperAddress, Connection] = {}
        self._passed_over: set[KeeperAddress] = set()

    def pass_over(self, keeper: KeeperAddress) -> bool:
        """Waits for this holder no more, and asks it nothing; from any thread. False: it was told before."""
        if keeper in self._passed_over:
            return False
        self._passed_over.add(keeper)
        connection = self._connections.get(keeper)
        if connection is not None:
            connection.close()
        return True

    def close(self) -> None:
        """Ends the connections; idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _from_keepers(self, shard: ShardRecord, start: int, stop: int) -> bytearray:
        problems: list[str] = []
        holders = self._holders.get(shard.file, [])
        for address in list(holders):
            try:
                if address in self._passed_over:
                    raise ConnectionError("it is known to be silent")
                return self._ask(address, shard, start, stop)
            except StaleGenerationError:
                raise
            except (OSError, ClusterError) as error:
                text = error.message if isinstance(error, ClusterError) else f"{type(error).__name__}: {error}"
                problems.append(f"node {address.node_id[:8]}: {text}")
                holders.remove(address)  # not asked again for this shard
                with contextlib.suppress(KeyError):
                    self._connections.pop(address).close()
        raise CheckpointError(
            f"no keeper gives {shard.file} of step {self.manifest.step}: {'; '.join(problems) or 'no holder is left'}",
            fix="continue from the newest checkpoint on storage",
        )

    def _ask(self, address: KeeperAddress, shard: ShardRecord, start: int, stop: int) -> bytearray:
        self._on_wait()
        connection = self._connections.get(address)
        if connection is None:
            near = address.node_id == self._near
            connection = self._connections[address] = (
                connect_unix(address.unix, self._secret)
                if near
                else connect_tcp(address.host, address.port, self._secret)
            )
        answer = connection.ask(
            {"op": "read", "step": self.manifest.step, "file": shard.file, "start": start, "stop": stop},
            timeout=READ_SECONDS,
        )
        data = bytearray(int(answer["bytes"]))
        connection.receive_into(memoryview(data), lambda piece: self._on_piece())
        return data
