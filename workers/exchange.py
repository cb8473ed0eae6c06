"""What a keeper says on its sockets: grants slots to ranks, sends replicas to its peer, serves byte ranges.

Guarantees: a step of a rank is complete when its image was sealed, its CRC-32 is known and, where there is a peer, the
peer holds the same bytes (it computes the CRC itself while it receives); nothing of an older generation is accepted
once `fence` returned; a lost peer costs nothing but the wait for the next one, to which everything that the newest
steps need is sent again; what is served to a reader was compared with its checksum since the last fence, and a damaged
image is dropped, so that the reader asks the next holder. Costs one thread per connection and per image in flight, one
pass over the image for the CRC (about 3 GB/s) and one over the network.
"""

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from raycp.errors import ClusterError, RaycpError, StaleGenerationError
from raycp.training.manifest import ShardEntry, ShardRecord, shard_file
from workers.slots import Slot, SlotState, SlotTable
from workers.wire import STALL_SECONDS, Connection, KeeperAddress, Message, accepted, connect_tcp

RETRY_SECONDS = 0.2
AGAIN_SECONDS = 5.0
"""A committed step that lost one of its two homes is copied again after this, unless a newer one is committed first."""
REFUSALS = 3
"""A peer that refuses an image so often is not asked again."""
UNREACHED_SECONDS = 60.0
"""So long a peer may be out of reach, while the driver says that it is the peer, before an image has no replica."""
WAIT_SECONDS = 0.5
_REPLICAS = "replicas"


class Exchange:
    """The slots of a keeper under one lock, and all conversations about them.

    Args:
        secret: of the run.
        generation: the first one that is accepted.

    Attributes:
        changed: the lock of everything here; notified when a slot, the peer or the generation changes.
    """

    def __init__(self, *, secret: bytes, generation: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.table = SlotTable()
        self.generation = generation
        self.peer: KeeperAddress | None = None
        self.address: KeeperAddress | None = None
        self.closed = False
        self._secret = secret
        self._connections: set[Connection] = set()
        self._sending: set[Connection] = set()
        self._unreached: KeeperAddress | None = None

    # -- orders of the keeper ---------------------------------------------------------------------------------------

    def fence(self, generation: int) -> None:
        """Refuses everything of an older generation from now on, and cuts off whoever is in the middle of it.

        Raises:
            StaleGenerationError: `generation` itself is older.
        """
        with self.changed:
            self.require(generation)
            if generation == self.generation:
                return
            self.generation = generation
            self.table.fence()
            for connection in list(self._connections):
                connection.close()
            self.changed.notify_all()

    def require(self, generation: int) -> None:
        """Raises:
        StaleGenerationError: a newer generation is in force.
        """
        if generation < self.generation:
            raise StaleGenerationError(
                f"generation {generation} was fenced off: generation {self.generation} is in force",
                fix="another driver continued this run: end this one",
            )

    def assign(self, peer: KeeperAddress | None, live: Sequence[KeeperAddress]) -> None:
        """Sets where replicas go; sends again what the newest steps need there.

        Args:
            peer: keeper of the next node, None if there is no other.
            live: all keepers of the run; a replica whose original is not with one of them gets a second home, too.
        """
        with self.changed:
            if peer != self.peer:
                for connection in self._sending:
                    connection.close()
            self.peer, self._unreached = peer, None
            for slot in self.table.slots:
                alone = slot.replica and bool(live) and slot.source not in live
                if slot.replica and not alone:
                    continue
                slot.problem = ""
                if slot.state is SlotState.VERIFIED:  # else it is sent as soon as it is
                    self._spawn(self._replicate, slot, after=AGAIN_SECONDS if self.table.protects(slot) else 0.0)
            self.changed.notify_all()

    def complete(self, slot: Slot) -> bool:
        """Whether the slot needs nothing more to be committed."""
        return slot.state is SlotState.VERIFIED and (self.peer is None or self.peer in slot.copies)

    def close(self) -> None:
        """Ends every conversation and gives all memory back."""
        with self.changed:
            self.closed = True
            for connection in (*self._connections, *self._sending):
                connection.close()
            self.table.close()
            self.changed.notify_all()

    @contextlib.contextmanager
    def using(self, slot: Slot) -> Iterator[memoryview]:
        """The bytes of a slot, which stay while the context lasts."""
        with self.changed:
            if slot.retired:
                raise ClusterError(f"step {slot.step} is no longer held", fix="ask for the newest step")
            self.table.use(slot)
            view = slot.image.view
        try:
            yield view
        finally:
            del view
            with self.changed:
                self.table.done(slot)

    # -- conversations ----------------------------------------------------------------------------------------------

    def converse(self, connection: Connection) -> None:
        """Answers the requests of one peer until it leaves."""
        handlers: dict[str, Callable[[Connection, Message], None]] = {
            "grant": self._grant,
            "sealed": self._sealed,
            "read": self._read,
            "replica": self._receive,
        }
        with self.changed:
            if self.closed:
                return
            self._connections.add(connection)
        try:
            while True:
                request = connection.receive()
                try:
                    handler = handlers[str(request.get("op"))]
                    handler(connection, request)
                except StaleGenerationError as error:
                    connection.send({"refused": error.message, "stale": True})
                except RaycpError as error:
                    connection.send({"refused": error.message})
                except (KeyError, TypeError, ValueError) as error:
                    connection.send({"refused": f"a request that makes no sense: {error!r}"})
        finally:
            with self.changed:
                self._connections.discard(connection)
                self.table.left(connection)
                self.changed.notify_all()

    def _grant(self, connection: Connection, request: Message) -> None:
        rank, step, generation, size = (int(request[k]) for k in ("rank", "step", "generation", "bytes"))
        slot = self._wait_for_slot(
            connection,
            in_force=generation,
            replica=False,
            rank=rank,
            step=step,
            generation=generation,
            file=shard_file(generation, rank),
            size=size,
            holder=connection,
        )
        with self.using(slot):
            number = slot.image.number
            with self.changed:
                answer = {"image": number, "images": self.table.images_of(connection)}
            connection.send(answer, slot.image.descriptor if number not in request["images"] else None)

    def _sealed(self, connection: Connection, request: Message) -> None:
        entries = [ShardEntry.from_dict(e) for e in request["entries"]]
        with self.changed:
            self.require(int(request["generation"]))
            slot = next((s for s in self.table.slots if s.holder is connection and s.state is SlotState.FILLING), None)
            if slot is None or slot.step != int(request["step"]):
                raise ClusterError(f"no slot of step {request['step']} is being filled", fix="ask for a slot first")
            self.table.seal(slot, entries)
            self._spawn(self._finish, slot)
            self.changed.notify_all()
        connection.send({"ok": True})

    def _read(self, connection: Connection, request: Message) -> None:
        step, file, start, stop = (
            int(request["step"]),
            str(request["file"]),
            int(request["start"]),
            int(request["stop"]),
        )
        with self.changed:
            slot = self.table.find(step, file)
            if slot is None:
                raise ClusterError(f"{file} of step {step} is not held here", fix="ask another holder")
            self.table.use(slot)
        try:
            if not 0 <= start <= stop <= slot.image.size:
                raise ClusterError(f"bytes [{start}, {stop}) of {slot.image.size} were asked for", fix="ask within it")
            self.check(slot)
            connection.send({"bytes": stop - start})
            connection.send_file(slot.image.descriptor, start, stop - start)
        finally:
            with self.changed:
                self.table.done(slot)

    def check(self, slot: Slot) -> None:
        """Compares a slot in use with its checksum, once in a generation.

        Raises:
            ClusterError: it was damaged; it is dropped.
        """
        if slot.checked:
            return
        found = zlib.crc32(slot.image.view)
        with self.changed:
            if found == slot.crc32:
                slot.checked = True
                return
        self._discard(slot)
        raise ClusterError(
            f"{slot.file} of step {slot.step} was damaged in memory: checksum {found:08x}, not {slot.crc32:08x}",
            fix="check the memory of that machine",
        )

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _finish(self, slot: Slot) -> None:
        """Makes a sealed image complete."""
        try:
            with self.using(slot) as view:
                found = zlib.crc32(view)
        except ClusterError:  # taken back before this thread began
            return
        with self.changed:
            known = self.table.verify(slot, found)
            self.changed.notify_all()
        if known:
            self._replicate(slot)

    def _replicate(self, slot: Slot) -> None:
        """Sends a verified image to the peer until that one acknowledges it, is replaced, refuses it for good or
        cannot be reached for too long: the driver, which may well reach it, is told and gives the step up.
        """
        with self.changed:
            peer = self.peer
            if peer is None or slot.sending == peer:
                return
            slot.sending = peer  # a thread that hangs at the peer before must not hold this one up
        refused, began = 0, time.monotonic()
        while True:
            with self.changed:
                generation = self.generation
                if self.closed or slot.retired or slot.problem or peer in slot.copies or self.peer != peer:
                    slot.sending = None if slot.sending == peer else slot.sending
                    return
                self.table.use(slot)
            problem = ""
            try:
                self._send(slot, peer, generation)
                with self.changed:
                    slot.copies.add(peer)
                    self._unreached = None
            except StaleGenerationError:
                pass  # this keeper will hear of the newer generation, or is the one that nobody wants
            except OSError as error:  # mostly the driver learns from Ray that the peer is lost, and assigns another
                patience = 0.0 if self._unreached == peer else UNREACHED_SECONDS
                if time.monotonic() - began > patience:
                    self._unreached = peer
                    problem = f"the keeper of node {peer.node_id[:8]} cannot be reached: {error}"
            except ClusterError as error:
                refused += 1
                problem = error.message if refused == REFUSALS else ""
            finally:
                with self.changed:
                    self.table.done(slot)
            with self.changed:
                if self.peer == peer:
                    slot.problem = problem
                self.changed.notify_all()
                if peer not in slot.copies:
                    self.changed.wait_for(lambda: self.closed or self.peer != peer, RETRY_SECONDS)

    def _send(self, slot: Slot, peer: KeeperAddress, generation: int) -> None:
        connection = connect_tcp(peer.host, peer.port, self._secret)
        with self.changed:
            source = self.address
            if source is None or self.peer != peer:
                connection.close()
                raise ConnectionError("the peer changed")
            self._sending.add(connection)
        try:
            connection.send(
                {
                    "op": "replica",
                    "generation": generation,
                    "of": slot.generation,
                    "rank": slot.rank,
                    "step": slot.step,
                    "source": vars(source),
                    "record": slot.record.to_dict(),
                }
            )
            if accepted(connection.receive()).get("held"):  # a slot may have to wait for a commit there
                return
            connection.send_file(slot.image.descriptor, 0, slot.image.size)
            accepted(connection.receive(timeout=STALL_SECONDS))
        finally:
            with self.changed:
                self._sending.discard(connection)
            connection.close()

    def _receive(self, connection: Connection, request: Message) -> None:
        """Takes a replica of the keeper before this one."""
        record = ShardRecord.from_dict(request["record"])
        step, generation = int(request["step"]), int(request["generation"])
        with self.changed:
            held = self.table.find(step, record.file)
        if held is not None and held.crc32 == record.crc32:
            connection.send({"held": True})
            return
        slot = self._wait_for_slot(
            connection,
            in_force=generation,
            replica=True,
            rank=int(request["rank"]),
            step=step,
            generation=int(request["of"]),
            file=record.file,
            size=record.bytes,
            holder=_REPLICAS,
            source=KeeperAddress(**request["source"]),
        )
        checksum = 0

        def seen(piece: memoryview) -> None:
            nonlocal checksum
            checksum = zlib.crc32(piece, checksum)

        try:
            with self.using(slot) as view:
                connection.send({"ok": True})
                connection.receive_into(view, seen)
            with self.changed:
                self.require(generation)
                if checksum != record.crc32:
                    raise ClusterError(
                        f"{record.file} of step {step} came with checksum {checksum:08x}, not {record.crc32:08x}",
                        fix="check the memory and the network of the two machines",
                    )
                self.table.seal(slot, record.entries)
                self.table.verify(slot, checksum)
                self.changed.notify_all()
        except BaseException:
            self._discard(slot)
            raise
        connection.send({"ok": True})

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _wait_for_slot(
        self,
        connection: Connection,
        *,
        in_force: int,
        replica: bool,
        rank: int,
        step: int,
        generation: int,
        file: str,
        size: int,
        holder: Any,
        source: KeeperAddress | None = None,
    ) -> Slot:
        """A slot with its memory, when the commit of the step before allows it."""
        slot: Slot | None = None
        try:
            with self.changed:
                while slot is None:
                    self.require(in_force)
                    if self.closed or not connection.is_open:
                        raise ConnectionResetError("the peer left")
                    if in_force == self.generation:  # else the driver has not told this keeper yet
                        slot = self.table.grant(
                            replica=replica,
                            rank=rank,
                            step=step,
                            generation=generation,
                            file=file,
                            size=size,
                            holder=holder,
                            source=source,
                        )
                    if slot is None:
                        self.changed.wait(WAIT_SECONDS)
            with self.using(slot):
                slot.image.reserve()
        except ConnectionError:
            raise
        except OSError as error:
            if slot is not None:
                self._discard(slot)
            raise ClusterError(
                f"no memory for {size} bytes of step {step} of rank {rank}: {error.strerror or error}",
                fix="free memory there, use more nodes, or raise elastic.snapshot_every",
            ) from error
        return slot

    def _discard(self, slot: Slot) -> None:
        with self.changed:
            if not slot.retired:
                self.table.retire(slot)
            self.changed.notify_all()

    def _spawn(self, body: Callable[[Slot], None], slot: Slot, *, after: float = 0.0) -> None:
        thread = threading.Timer(after, body, args=(slot,))
        thread.daemon = True
        thread.start()
