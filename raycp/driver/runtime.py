"""What the controller asks of the world outside: workers, ranks, the store, keepers, time.

Guarantees: the state machine knows these protocols only, so that it is tested with a fake cluster, a fake clock and
planted faults, and runs on Ray unchanged. Costs nothing.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from raycp.driver.cluster import ClusterHandle, NodeInfo
from raycp.driver.fleet import Fleet
from raycp.driver.keepers import Keepers
from raycp.driver.membership import Member, Membership
from raycp.driver.store import open_store
from raycp.training.manifest import Manifest
from raycp.training.peak import peak_flops
from workers.memory_reader import MemoryPoint
from workers.messages import Probe, RunSpec
from workers.wire import KeeperAddress


class WorkerLike(Protocol):
    """See `raycp.driver.fleet.Worker`."""

    @property
    def actor(self) -> Any: ...
    @property
    def probe(self) -> Probe: ...


class FleetLike(Protocol):
    """See `raycp.driver.fleet.Fleet`."""

    @property
    def workers(self) -> Sequence[Any]: ...
    @property
    def warming(self) -> bool: ...
    @property
    def nodes(self) -> Sequence[NodeInfo]: ...
    def staff(self, workers: int, *, spares: int, cp: int, timeout: float, check_stop: Callable[[], None]) -> None: ...
    def recruit(self, target: int) -> int: ...
    def dismiss(self, workers: Sequence[Any], kill: Callable[[str, int, float], bool]) -> None: ...
    def drop_lost(self, among: Sequence[Any], seconds: float) -> None: ...
    def avoid(self, node_id: str) -> None: ...
    def lost_idle(self, among: Sequence[Any], seconds: float) -> Sequence[Any]: ...
    def close(self) -> None: ...


class RanksLike(Protocol):
    """See `raycp.driver.membership.Membership`."""

    @property
    def members(self) -> Sequence[Member]: ...
    def gather(
        self,
        call: Callable[[Member], Any],
        *,
        what: str,
        only: Sequence[int] | None = None,
        patience: float = 1.0,
        meanwhile: Callable[[], None] | None = None,
        release: Callable[[], None] | None = None,
    ) -> list[Any]: ...
    def let_go(self, keeper: KeeperAddress) -> None: ...
    def pass_over(self, keepers: Iterable[KeeperAddress]) -> None: ...
    def freeze(self, seconds: float) -> list[int]: ...
    def abort(self, ranks: Sequence[int] | None = None) -> None: ...


class KeepersLike(Protocol):
    """See `raycp.driver.keepers.Keepers`."""

    @property
    def addresses(self) -> dict[str, KeeperAddress]: ...
    def add(self, node: NodeInfo) -> None: ...
    def begin(self, node: NodeInfo) -> None: ...
    def drop(self, node_id: str) -> None: ...
    def assign(self, generation: int, node_of_rank: Sequence[str], short: Collection[str] = ()) -> None: ...
    def expect(self, step: int) -> None: ...
    def poll(self, timeout: float = 0.0) -> Sequence[Any]: ...
    def commit(self, manifest: Manifest) -> None: ...
    def abandon(self, step: int) -> None: ...
    def newest(self, known: Collection[int] | None = None) -> MemoryPoint | None: ...
    def unreachable(self, seconds: float, suspects: Collection[str] = ()) -> Sequence[str]: ...
    def keep_only(self, point: MemoryPoint | None) -> None: ...
    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> Any: ...
    def kill_process(self, node_id: str, pid: int, started: float) -> bool: ...
    def is_stopped(self, node_id: str, pid: int, started: float) -> bool: ...
    def silent(self) -> dict[str, KeeperAddress]: ...
    def beat(self) -> None: ...
    def close(self) -> None: ...


class Runtime(Protocol):
    """Makes the parts, and tells the time."""

    @property
    def address(self) -> str: ...
    @property
    def local(self) -> bool: ...
    @property
    def fleet(self) -> FleetLike: ...
    def ranks(
        self, members: Sequence[Member], generation: int, *, is_stopped: Callable[[Member], bool]
    ) -> RanksLike: ...
    def open_store(self) -> Any: ...
    def held(self) -> dict[str, int]: ...
    def keepers(self, nodes: Sequence[NodeInfo], *, generation: int) -> KeepersLike: ...
    def clock(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class RayRuntime:
    """The real one.

    Args:
        spec: what the workers run.
        cluster: in use.
        namespace: Ray namespace of the run.
        secret: of the run.
        checkpoints: where checkpoints go.
        say: shows a message to the person.
        watch: takes rank 0's progress.
    """

    def __init__(
        self,
        spec: RunSpec,
        cluster: ClusterHandle,
        *,
        namespace: str,
        secret: bytes,
        checkpoints: str,
        say: Callable[[str], None],
        watch: Callable[[dict[str, Any]], None],
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._namespace = namespace
        self._secret = secret
        self._checkpoints = checkpoints
        self._watch = watch
        self._skus: list[str] = []
        self.fleet: FleetLike = Fleet(spec, cluster, say)

    @property
    def address(self) -> str:
        """The driver's address in the cluster."""
        return self._cluster.driver_address

    @property
    def local(self) -> bool:
        """Whether the cluster ends with this process."""
        return self._cluster.started_here

    def ranks(self, members: Sequence[Member], generation: int, *, is_stopped: Callable[[Member], bool]) -> RanksLike:
        self._skus = [m.probe.sku for m in members]
        return Membership(
            members,
            generation=generation,
            unresponsive_after=self._spec.config.elastic.heartbeat_timeout,
            watch=self._watch,
            is_stopped=is_stopped,
        )

    def peak(self) -> float | None:
        """FLOP/s of the devices of all ranks that run, by `FitConfig.peak_flops`; None where one is not known."""
        peaks = [peak_flops(sku, self._spec.config.peak_flops) for sku in self._skus]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) if len(known) == len(peaks) > 0 else None

    def open_store(self) -> Any:
        return open_store(self._cluster.driver_address)

    def held(self) -> dict[str, int]:
        """Bytes that keepers of an earlier driver of this run hold, by node id."""
        return Keepers.attach(self._namespace).held_bytes()

    def keepers(self, nodes: Sequence[NodeInfo], *, generation: int) -> KeepersLike:
        return Keepers.start(
            nodes,
            run_id=self._spec.run_id,
            namespace=self._namespace,
            secret=self._secret,
            generation=generation,
            ttl=self._spec.config.elastic.keeper_ttl,
            checkpoints=self._checkpoints,
            unresponsive_after=self._spec.config.elastic.heartbeat_timeout,
        )

    def clock(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def secret_of(folder: Path, make: Callable[[], bytes]) -> bytes:
    """The run's secret: `.raycp/secret` below the output folder, readable by its owner only; made if missing."""
    import os

    path = folder / ".raycp" / "secret"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        handle = os.open(path.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(make())
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".tmp"), path)
    return path.read_bytes()
