"""Keeper: a process of its own on every node that holds the newest training state in memory. No torch.

Guarantees: it outlives ranks and driver; from the newest committed step on this node to its replica on the next one,
nothing is given up before something newer is committed; everything of an older generation is refused; when no driver
was heard for `ttl` seconds it writes the newest committed step to storage, commits it there if all shards of it are
(whichever keeper is last does), and ends, leaving no memory behind; it ends with its node's raylet, too. Its methods
are called through Ray (detached and named, see `raycp.driver.keepers`); the images travel over its own sockets
(`workers.exchange`). Costs a process of about 100 MB, and the memory that `raycp.driver.copies` counts.
"""

import contextlib
import hashlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from raycp.errors import CheckpointError, ClusterError, RaycpError, StaleGenerationError
from raycp.training.committed import commit_if_whole
from raycp.training.manifest import Manifest, ManifestChange, ShardRecord, ShardSum, whole
from raycp.training.storage import Storage
from workers.exchange import WAIT_SECONDS, Exchange
from workers.flush import flush_alone, verified_pieces
from workers.processes import is_stopped, kill_process
from workers.slots import Pins, Slot, SlotState
from workers.wire import KeeperAddress, Server, listen_tcp, listen_unix

SETTLE_SECONDS = 30.0
"""How long an inventory waits for checksums that are being computed."""
WATCH_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""How long the holder of a replica leaves the writing to the holder of the original."""


@dataclass(frozen=True, kw_only=True)
class HeldShard:
    """One verified image.

    Attributes:
        step: optimizer steps done.
        generation: of the process groups whose state it is.
        rank: of that generation.
        replica: its original is, or was, with another keeper.
        replicated: the keeper's peer holds it too, or there is no peer.
        record: as a manifest names it.
    """

    step: int
    generation: int
    rank: int
    replica: bool
    replicated: bool
    record: ShardRecord


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a keeper holds.

    Attributes:
        generation: the one in force.
        shards: all verified images.
        manifests: of the newest two committed steps that it heard of, the older one first.
        bytes: memory of all images, spare ones included.
    """

    generation: int
    shards: tuple[HeldShard, ...]
    manifests: tuple[Manifest, ...]
    bytes: int


class Keeper:
    """The keeper of one node. All methods may be called at once.

    Args:
        run_id: of the run.
        secret: that ranks and keepers of the run share.
        generation: the first that is accepted.
        ttl: seconds without a word of the driver after which it writes to storage and ends.
        checkpoints: root of the step folders: an absolute path or a URL.
        node_id: Ray's id of this node; asked for if not given.
        host: the address to listen on; the node's address in the cluster if not given.
        end: ends the process.
    """

    def __init__(
        self,
        *,
        run_id: str,
        secret: bytes,
        generation: int,
        ttl: float,
        checkpoints: str,
        node_id: str | None = None,
        host: str | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        if node_id is None or host is None:
            import ray

            node_id = node_id or str(ray.get_runtime_context().get_node_id())
            host = host or str(ray.util.get_node_ip_address())
        self._ttl = ttl
        self._checkpoints = Storage.of(checkpoints)
        self._end = end or _end_process
        self._exchange = Exchange(secret=secret, generation=generation)
        self._changed = self._exchange.changed
        self._ranks: tuple[int, ...] | None = None
        self._manifests: list[Manifest] = []
        self._pins = Pins(self._exchange.table)
        self._heard = time.monotonic()
        self._closed = threading.Event()
        # The name tells strangers nothing, and two keepers that follow each other do not meet.
        name = f"raycp-{hashlib.sha256(f'{run_id} {node_id}'.encode()).hexdigest()[:32]}-{secrets.token_hex(4)}"
        tcp = listen_tcp(host)
        self._address = KeeperAddress(node_id=node_id, host=host, port=int(tcp.getsockname()[1]), unix=name)
        self._exchange.address = self._address
        self._servers = [
            Server(listen_unix(name), secret, self._exchange.converse, name="raycp-node"),
            Server(tcp, secret, self._exchange.converse, name="raycp-cluster"),
        ]
        threading.Thread(target=self._watch, name="raycp-ttl", daemon=True).start()

    def address(self) -> KeeperAddress:
        """Where it listens."""
        return self._address

    # -- generations ------------------------------------------------------------------------------------------------

    def beat(self, generation: int) -> None:
        """The driver of `generation` lives."""
        self._hear(generation)

    def fence(self, generation: int) -> None:
        """Refuses every grant, seal, replica and commit of an older generation from now on.

        Raises:
            StaleGenerationError: a newer one is in force.
        """
        self._hear(generation)
        with self._changed:
            if generation > self._exchange.generation:
                self._ranks = None
                self._pins.clear()
            self._exchange.fence(generation)

    def take_over(self, generation: int, *, ttl: float, checkpoints: str) -> None:
        """Another driver found this keeper: as `fence`, and what its command says holds from now on.

        Args:
            generation: of the driver.
            ttl, checkpoints: as at the start.

        Raises:
            StaleGenerationError: a newer one is in force.
        """
        self.fence(generation)
        with self._changed:
            self._ttl, self._checkpoints = ttl, Storage.of(checkpoints)

    def assign(
        self,
        generation: int,
        ranks: Sequence[int],
        peer: KeeperAddress | None,
        live: Sequence[KeeperAddress] = (),
    ) -> None:
        """Says which ranks run on this node and where their replicas go; fences older generations.

        Args:
            generation: of the ranks' process groups.
            ranks: world ranks of this node.
            peer: keeper of the next node; None if there is only one.
            live: all keepers of the run.
        """
        self.fence(generation)
        with self._changed:
            self._ranks = tuple(ranks)
            self._exchange.assign(peer, live)

    # -- steps ------------------------------------------------------------------------------------------------------

    def collect(
        self, generation: int, step: int, timeout: float, known: Mapping[str, int] | None = None
    ) -> list[ShardRecord | ShardSum] | None:
        """Waits until the images of all ranks of this node are sealed, verified and replicated. Entries whose
        `layout_sum` the driver has in `known`, by file, are not sent again.

        Returns:
            Their records in rank order; None after `timeout` seconds, or once a newer generation is in force.

        Raises:
            StaleGenerationError: a newer generation is in force.
            ClusterError: the peer refuses the replica, with the reason.
        """
        self._hear(generation)
        records = self._collected(generation, step, timeout)
        return None if records is None else [r.brief((known or {}).get(r.file)) for r in records]

    def _collected(self, generation: int, step: int, timeout: float) -> list[ShardRecord] | None:
        deadline = time.monotonic() + timeout
        exchange = self._exchange
        with self._changed:
            while not self._closed.is_set():
                if generation < exchange.generation:  # the driver went on and asks again; another one meets the fence
                    return None
                if self._ranks is not None and generation == exchange.generation:
                    slots = [self._own(generation, rank, step) for rank in self._ranks]
                    found = [s for s in slots if s is not None]
                    problem = next((s.problem for s in found if s.problem), "")
                    if problem:
                        raise ClusterError(
                            f"step {step} has no replica: {problem}",
                            fix="see the reason",
                            node_id=self._address.node_id,
                        )
                    if len(found) == len(slots) and all(exchange.complete(s) for s in found):
                        return [s.record for s in found]
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(min(left, WAIT_SECONDS))
        return None

    def commit(self, told: Manifest | ManifestChange) -> bool:
        """The step of this manifest is committed: its slots are protected, older ones may be written again.

        Returns:
            False: a change of a manifest that this keeper does not have; it needs the whole one.

        Raises:
            StaleGenerationError: it is of an older generation.
        """
        self._hear(told.generation)
        with self._changed:
            self._exchange.require(told.generation)
            manifest = whole(told, self._manifests)
            if manifest is None:
                return False
            if self._exchange.table.commit(manifest.generation, manifest.step, [s.file for s in manifest.shards]):
                self._manifests = [*(m for m in self._manifests if m.age != manifest.age), manifest][-2:]
            self._changed.notify_all()
            return True

    def abandon(self, generation: int, step: int) -> None:
        """What another keeper or rank held of the steps up to this one is lost: they wait for no commit any more.

        Raises:
            StaleGenerationError: a newer generation is in force.
        """
        self._hear(generation)
        with self._changed:
            self._exchange.table.abandon(generation, step)
            self._changed.notify_all()

    # -- recovery ---------------------------------------------------------------------------------------------------

    def inventory(self) -> Inventory:
        """What is held; waits for checksums that are being computed."""
        self._heard = time.monotonic()
        table = self._exchange.table
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed.is_set() or all(s.state is not SlotState.SEALED for s in table.slots),
                SETTLE_SECONDS,
            )
            return Inventory(
                generation=self._exchange.generation,
                shards=tuple(
                    HeldShard(
                        step=s.step,
                        generation=s.generation,
                        rank=s.rank,
                        replica=s.replica,
                        replicated=self._exchange.complete(s),
                        record=s.record,
                    )
                    for s in table.slots
                    if s.state is SlotState.VERIFIED
                ),
                manifests=tuple(self._manifests),
                bytes=table.bytes,
            )

    def keep_only(self, generation: int, step: int, files: Sequence[str], *, by: int) -> None:
        """The run continues from these shards of this step; everything else is given up.

        Args:
            generation: of the step's manifest.
            step: optimizer steps done; -1, with no files, gives up everything.
            files: of the manifest's shards.
            by: generation of the driver.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        self._hear(by)
        with self._changed:
            self._exchange.table.keep_only(generation, step, files)
            self._manifests = [m for m in self._manifests if m.age == (generation, step)]
            self._changed.notify_all()

    def kill(self, pid: int, started: float, *, by: int) -> bool:
        """Kills a process of this node at once, if it is the one that was started then (process ids come again).

        Args:
            pid: its id.
            started: its start as `psutil.Process(pid).create_time()` gives it.
            by: generation of the driver.

        Returns:
            False: it is gone, or another process has its id.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        self._hear(by)
        return kill_process(pid, started)

    def is_stopped(self, pid: int, started: float, *, by: int) -> bool:
        """Whether a process of this node was stopped by a signal: it will not answer, however long one waits.

        Args:
            pid, started: as in `kill`.
            by: generation of the driver.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        self._hear(by)
        return is_stopped(pid, started)

    # -- storage ----------------------------------------------------------------------------------------------------

    def pin(self, step: int, files: Sequence[str], *, order: str, by: int) -> list[str]:
        """Keeps these shards until the `persist` of the same order has written them, whatever becomes of other orders
        for the same ones; returns those that are not held. Nothing is held for an order that was unpinned.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        self._hear(by)
        with self._changed:
            return self._pins.hold(order, step, files)

    def unpin(self, order: str, *, by: int) -> None:
        """Gives up an order of `pin` that nobody will `persist`, also one that is still on its way.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        self._hear(by)
        with self._changed:
            self._pins.end(order)

    def persist(
        self, manifest: Manifest, folder: str, files: Sequence[str], *, commit: bool, order: str, by: int
    ) -> None:
        """Writes these shards to storage; durable when it returns. This order does not pin them any more then.

        Args:
            manifest: names lengths and checksums, which are compared.
            folder: of the step.
            files: names of shards that are held here.
            commit: also commits the step if all shards of it are there.
            by: generation of the driver.

        Raises:
            OSError: the storage refused.
            CheckpointError: a shard is not held, or is damaged.
            StaleGenerationError: a newer driver has this keeper, or a newer generation committed to that storage.
        """
        self._hear(by)
        storage = Storage.of(folder)
        try:
            for shard in manifest.shards:
                if shard.file in files:
                    self._write(storage, manifest.step, shard, order)
        finally:
            with self._changed:
                self._pins.end(order)
        if commit:
            commit_if_whole(storage, manifest)

    def close(self, *, by: int | None = None) -> None:
        """Gives all memory back and ends the process.

        Args:
            by: generation of the driver; None: its own decision.

        Raises:
            StaleGenerationError: a newer driver has this keeper.
        """
        if by is not None:
            self._hear(by)
        self._close()
        self._end()

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._closed.set()
        for server in self._servers:
            server.close()
        with self._changed:
            self._pins.clear()
            self._exchange.close()

    def _hear(self, generation: int) -> None:
        with self._changed:
            self._exchange.require(generation)  # a fenced driver does not keep its keepers alive
            self._heard = time.monotonic()

    def _own(self, generation: int, rank: int, step: int) -> Slot | None:
        return next(
            (
                s
                for s in self._exchange.table.slots
                if not s.replica and (s.generation, s.rank, s.step) == (generation, rank, step)
            ),
            None,
        )

    @contextlib.contextmanager
    def _image(self, step: int, shard: ShardRecord, order: str) -> Iterator[memoryview]:
        with self._changed:
            slot = self._pins.get(order, step, shard.file) or self._exchange.table.find(step, shard.file)
            if slot is None or slot.crc32 != shard.crc32 or slot.image.size != shard.bytes:
                raise CheckpointError(
                    f"{shard.file} of step {step} is not held on node {self._address.node_id[:8]}",
                    fix="write an older or a newer step",
                )
            self._exchange.table.use(slot)
        try:
            yield slot.image.view
        finally:
            with self._changed:
                self._exchange.table.done(slot)

    def _write(self, storage: Storage, step: int, shard: ShardRecord, order: str = "") -> None:
        with self._image(step, shard, order) as view:
            storage.write(shard.file, verified_pieces(view, shard))

    # -- without a driver -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        parent = os.getppid()
        while not self._closed.wait(min(WATCH_SECONDS, self._ttl / 10)):
            if os.getppid() != parent:  # the raylet died: for Ray this node is lost, and its processes are nobody's
                self.close()
            elif time.monotonic() - self._heard > self._ttl:
                self._expire()

    def _expire(self) -> None:
        """Writes the newest committed step and ends; a storage that fails is asked again for another `ttl`."""
        deadline = time.monotonic() + self._ttl
        heard = self._heard
        while not self._closed.is_set() and self._heard == heard:
            try:
                self._flush()
            except StaleGenerationError:
                pass  # the run goes on elsewhere
            except (OSError, RaycpError) as error:
                with contextlib.suppress(OSError):  # its log may be on the disk that is full
                    print(f"raycp keeper {self._address.node_id[:8]}: {error}", file=sys.stderr, flush=True)
                if time.monotonic() < deadline:
                    self._closed.wait(min(5.0, self._ttl / 4))
                    continue
            if self._heard == heard:
                self.close()
            return

    def _flush(self) -> None:
        table = self._exchange.table
        with self._changed:
            manifest = self._manifests[-1] if self._manifests else None
            if manifest is None:
                return
            held = {s.file: table.find(manifest.step, s.file) for s in manifest.shards}
        flush_alone(
            manifest,
            self._checkpoints,
            own={file for file, slot in held.items() if slot is not None and not slot.replica},
            replicas={file for file, slot in held.items() if slot is not None and slot.replica},
            write=lambda folder, shard: self._write(folder, manifest.step, shard),
            grace=min(GRACE_SECONDS, self._ttl),
        )


def _end_process() -> None:
    """Ends this process a moment later, so that the answer to whoever asked for it gets out."""
    timer = threading.Timer(0.2, os._exit, args=(0,))
    timer.daemon = True
    timer.start()
