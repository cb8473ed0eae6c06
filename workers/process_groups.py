"""The life cycle of a rank's process groups: create, warm, abort, rebuild, destroy.

Guarantees: groups of one generation live under their own store prefix, so that no key of an older generation is ever
read; all groups are made in the same order on every rank; `abort` frees every operation of this process that waits on
a peer, within milliseconds and from any thread (for gloo, which has no abort, by cutting its sockets), and may be
called any number of times; nothing made with a group outlives it, since the mesh belongs to this object too.
Costs: create and warm 0.05-0.2 s on CPU. Limits: `abort` of gloo groups needs Linux.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout, _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from raycp.attention import Groups, build_groups
from raycp.attention.warm import warm_pairs
from raycp.errors import ClusterError, WorkerError
from raycp.training.abort import Abortable, Aborted, abort_all
from raycp.training.device import DeviceSpec
from raycp.training.mesh import build_mesh
from raycp.training.vendor import group_options
from workers.messages import Rendezvous
from workers.sockets import Endpoint, listeners, shut_sockets, use_interface_of

STORE_TIMEOUT = 2.0
"""Seconds that a rank tries to reach the store (torch tries twice, with a pause): it was there before the rank was
asked to join, and if it is gone, another rank has failed meanwhile."""
CONNECT_TIMEOUT = 20.0
"""Seconds that a rank waits for the store and for the others while groups are made: a rank that froze meanwhile cannot
be cut off by its ports, which nobody knows yet. The group's own time-out follows when all connections exist."""
LINK_TIMEOUT = 120.0
"""The same on accelerators, whose libraries build links between all devices meanwhile: HCCL's own patience."""


class ProcessGroups:
    """The groups of one rank in one generation.

    Attributes:
        rendezvous: where they were made.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        attention: Groups,
        mesh: DeviceMesh,
        *,
        address: str,
        listened_before: frozenset[Endpoint],
    ) -> None:
        self.rendezvous = rendezvous
        self._attention: Groups | None = attention
        self._mesh: DeviceMesh | None = mesh
        self._address = address
        self._listened_before = listened_before
        self._peers: frozenset[Endpoint] = frozenset()
        self._aborted = False
        self._warmed: list[dist.ProcessGroup] = []

    @classmethod
    def create(
        cls,
        rendezvous: Rendezvous,
        *,
        device: DeviceSpec,
        address: str,
        messages: Mapping[str, int] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> "ProcessGroups":
        """Joins the groups of `rendezvous.generation`. Collective: every rank of the grid calls it.

        Args:
            rendezvous: store, generation, rank and grid.
            device: chooses the back end (gloo, nccl, hccl).
            address: this node's address in the cluster; gloo listens on the interface that holds it, and no other
                (unless GLOO_SOCKET_IFNAME names another one).
            messages: bytes of the largest message of each kind of group, for buffers of HCCL.
            on_step: called when the store is reached, from where on ranks wait for each other, and for each kind of
                group that is made.

        Raises:
            WorkerError: the store or a peer did not answer in time.
        """
        before = listeners()
        use_interface_of(address)
        patience = LINK_TIMEOUT if device.is_accelerator else CONNECT_TIMEOUT
        timeout = timedelta(seconds=min(rendezvous.timeout, patience))
        try:
            store = dist.TCPStore(
                rendezvous.store_host,
                rendezvous.store_port,
                None,
                False,
                timeout=min(timeout, timedelta(seconds=STORE_TIMEOUT)),
            )
            store.set_timeout(timeout)
            on_step()
            dist.init_process_group(
                device.backend,
                pg_options=group_options(device.backend),
                store=dist.PrefixStore(f"generation/{rendezvous.generation}", store),
                rank=rendezvous.rank,
                world_size=rendezvous.grid.world_size,
                timeout=timeout,
            )
            on_step()
            mesh = build_mesh(rendezvous.grid.world_size, device.name)
            attention = build_groups(
                rendezvous.grid,
                rank=rendezvous.rank,
                timeout=timeout,
                options=lambda kind: group_options(device.backend, message_bytes=(messages or {}).get(kind, 0)),
            )
            on_step()
        except (RuntimeError, dist.DistError) as error:
            _forget_attempt()
            raise WorkerError(  # most likely a consequence of a failure elsewhere
                f"rank {rendezvous.rank} of generation {rendezvous.generation} could not connect through the store "
                f"{rendezvous.store_host}:{rendezvous.store_port}: {error}",
                fix="let every node reach the driver's node and each other on all TCP ports",
                rank=rendezvous.rank,
            ) from error
        return cls(rendezvous, attention, mesh, address=address, listened_before=before)

    def warm(self) -> None:
        """One all-reduce on every group, in one order on all ranks, so that their connections exist. Collective.

        With another back end than gloo, whose pairs are connected from the start, each pair of ranks that will exchange
        rows sends a first message too (`raycp.attention.warm`). Call it again when groups were made since, such as a
        mesh of a model's: those are warmed then.
        """
        new = [group for group in self._all() if group not in self._warmed]
        for group in new:
            self._all_reduce(group)
        if not self._is_gloo and not self._warmed:
            warm_pairs(self.attention, torch.device(self.mesh.device_type))
        self._learn_peers()
        for group in new:
            _set_pg_timeout(timedelta(seconds=self.rendezvous.timeout), group)
        self._warmed += new

    def _learn_peers(self) -> None:
        """Publishes where this rank's gloo listens and learns where the peers' do. Collective.

        `abort` cuts what was accepted here, and what was connected to there. A number of a port alone says nothing: on
        another node it may be that of a connection of Ray's.
        """
        mine = [(self._address if _is_any(e.address) else e.address, e.port) for e in sorted(self._listening())]
        everyone: list[Any] = [None] * self.rendezvous.grid.world_size
        dist.all_gather_object(everyone, mine)
        self._peers = frozenset(Endpoint(*one) for found in everyone for one in found)

    def _listening(self) -> frozenset[Endpoint]:
        """Where these groups accept connections."""
        return listeners() - self._listened_before

    def abort(self) -> int:
        """Frees every waiting operation of this process. Returns the number of connections that were cut.

        Safe from any thread, at any time, any number of times. Afterwards the groups can only be destroyed.
        """
        self._aborted = True
        if not self._is_gloo:
            found = abort_all(backends_of(self._all()))
            if not found.clean:
                end_process(found)
            return 0
        return shut_sockets(self._listening(), self._peers)

    def destroy(self) -> None:
        """Drops every group. Call `abort` first unless all ranks are known to be idle."""
        self._mesh = self._attention = None
        self._warmed = []
        gc.collect()
        # DTensor remembers results of its operators by equal meshes, and would hand out those of this generation later
        # on, with the place that this rank has in it.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
        if dist.is_initialized():
            dist.destroy_process_group()

    def rebuild(
        self,
        rendezvous: Rendezvous,
        *,
        device: DeviceSpec,
        address: str,
        messages: Mapping[str, int] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> "ProcessGroups":
        """Aborts and destroys these groups, then joins those of a newer generation, in the same process; arguments as
        those of `create`.

        Raises:
            ClusterError: `rendezvous.generation` is not newer.
        """
        if rendezvous.generation <= self.rendezvous.generation:
            raise ClusterError(
                f"generation {rendezvous.generation} is not newer than {self.rendezvous.generation}",
                fix="raise the generation with every rebuild",
            )
        self.abort()
        self.destroy()
        return ProcessGroups.create(rendezvous, device=device, address=address, messages=messages, on_step=on_step)

    @property
    def attention(self) -> Groups:
        """The groups that context-parallel attention uses."""
        if self._attention is None:
            raise ClusterError("these groups were destroyed", fix="use the groups of the current generation")
        return self._attention

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh over all ranks; it ends with these groups (names repeat, so a stale mesh would use new groups)."""
        if self._mesh is None:
            raise ClusterError("these groups were destroyed", fix="use the groups of the current generation")
        return self._mesh

    @property
    def _is_gloo(self) -> bool:
        return not dist.is_initialized() or dist.get_backend() == "gloo"

    @staticmethod
    def _all() -> list[dist.ProcessGroup]:
        """Every group that this rank is a member of, whoever made it, in the order in which all ranks made them."""
        return list(_world.pg_map)

    def _all_reduce(self, group: dist.ProcessGroup) -> None:
        one = torch.ones(1, device=self.mesh.device_type)
        dist.all_reduce(one, group=group)
        size = dist.get_world_size(group)
        if float(one.item()) != size:
            raise ClusterError(
                f"a warm-up all-reduce over {size} ranks gave {float(one.item())}", fix="check the network back end"
            )


def _is_any(address: str) -> bool:
    return address in ("0.0.0.0", "::")


def _forget_attempt() -> None:
    """Leaves no trace of groups that could not be made.

    torch counts a group before it connects it, and names the next one by that count: without this, a rank that failed
    once would wait under another name than its peers for ever.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    _world.group_count = 0


def backends_of(groups: Sequence[dist.ProcessGroup]) -> dict[str, Abortable]:
    """Back ends that can be aborted, by a name for the log."""
    found: dict[str, Abortable] = {}
    for number, pg in enumerate(groups):
        device = min(pg._device_types, key=lambda d: d.type == "cpu")  # gloo names itself for several devices
        backend = pg._get_backend(device)
        if hasattr(backend, "abort"):
            found[f"group {number}"] = backend
    return found


def end_process(found: Aborted) -> None:
    """Ends this process at once: groups that cannot be aborted hold its device, and the driver replaces it."""
    with contextlib.suppress(OSError):  # it has to end all the same
        print(f"raycp: groups not aborted within {found.seconds:.1f} s: {found}; ending", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
