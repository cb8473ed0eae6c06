"""The keepers of a run as the driver sees them: one detached actor on every node.

Guarantees: a second driver finds the keepers of the first by namespace and name, and fences the first off; a step is
`Collected` only when every rank's image is verified and, where there are two nodes, on both of a pair; a keeper that
died, or answers no more, is `KeeperLost` with its node; no call waits longer than its stated bound for a keeper that
does not answer. Costs one process on each node (about 1 s to start) and, for each step, one long poll and one commit
message for each node.
"""

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from raycp.driver.cluster import NodeInfo, live_nodes
from raycp.driver.copies import Collected, Layouts, newest_point, replica_homes
from raycp.driver.keeper_calls import (
    COLLECT,
    CONTROL,
    LOOK_SECONDS,
    START_SECONDS,
    Arrivals,
    Ask,
    CopyRefused,
    Flush,
    KeeperLost,
    answered,
    answers_but,
    answers_of,
    end_actor,
    find_keepers,
    has_died,
    lost,
    on,
    order_flush,
    raise_first,
    start_keepers,
)
from raycp.driver.pulse import Pulse
from raycp.errors import ClusterError, StaleGenerationError
from raycp.training.manifest import Manifest, ManifestChange, ShardRecord
from workers.keeper import SETTLE_SECONDS, Inventory
from workers.memory_reader import MemoryPoint
from workers.wire import KeeperAddress

__all__ = ["Collected", "CopyRefused", "Flush", "KeeperLost", "Keepers", "MemoryPoint"]

ORDER_SECONDS = 10.0
"""How long a keeper may take to answer an order."""
COMMIT_SECONDS, ENTRY_SECONDS = 2.0, 4e-5
"""How long a keeper may take to note a commit, and how much longer for each entry of a manifest that travels whole."""
POLL_SECONDS = 5.0
"""Length of one long poll."""


@dataclass(kw_only=True)
class _Expected:
    began: float
    answers: dict[str, list[ShardRecord]] = field(default_factory=dict)


class Keepers:
    """The keepers of one run. `start` and `attach` make it. `beat` may be called from another thread.

    Attributes:
        addresses: of the keepers, by node id.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        namespace: str,
        generation: int,
        *,
        unresponsive_after: float = ORDER_SECONDS,
    ) -> None:
        self.addresses: dict[str, KeeperAddress] = {}
        self._options = dict(options)
        self._namespace = namespace
        self._generation, self._assigned = generation, -1
        self._handles: dict[str, Any] = {}
        self._arrivals = Arrivals()
        self._ranks: dict[str, list[int]] = {}
        self._peers: dict[str, str | None] = {}
        self._expected: dict[int, _Expected] = {}
        self._polls: dict[Any, tuple[str, int, float]] = {}
        self._where: dict[tuple[int, str], list[str]] = {}
        self._layouts = Layouts()
        self._committed: Manifest | None = None
        self._abandoned = -1
        self._lock = threading.Lock()
        self._pulse = Pulse(unresponsive_after)

    # -- life cycle -------------------------------------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        nodes: Sequence[NodeInfo],
        *,
        run_id: str,
        namespace: str,
        secret: bytes,
        generation: int,
        ttl: float,
        checkpoints: str,
        unresponsive_after: float = ORDER_SECONDS,
    ) -> "Keepers":
        """Finds the run's keepers on all live nodes, starts those that `nodes` lack, and fences older generations.

        Args:
            nodes: where ranks will run.
            run_id: of the run.
            namespace: of the run, in Ray.
            secret: of the run; the same for every driver of it.
            generation: of this driver.
            ttl: seconds that keepers outlive a driver; holds for those that are found, too.
            checkpoints: root of the step folders; the same.
            unresponsive_after: seconds without an answer to `beat` after which a keeper is lost.

        Raises:
            StaleGenerationError: a newer driver has the keepers.
            ClusterError: a keeper does not start.
        """
        options = {"run_id": run_id, "secret": secret, "ttl": ttl, "checkpoints": checkpoints}
        keepers = cls(options, namespace, generation, unresponsive_after=unresponsive_after)
        found = find_keepers(namespace)
        alive = {n.node_id for n in live_nodes()}
        fences = {
            node_id: on(handle, "take_over", CONTROL).remote(generation, ttl=ttl, checkpoints=checkpoints)
            for node_id, handle in found.items()
            if node_id in alive
        }
        answers = answers_of(fences, ORDER_SECONDS)
        located = answers_of(
            {
                node_id: on(found[node_id], "address", CONTROL).remote()
                for node_id, answer in answers.items()
                if not isinstance(answer, BaseException)
            },
            ORDER_SECONDS,
        )
        for node_id, answer in answers.items():
            if isinstance(answer, StaleGenerationError):
                raise answer
            address = located.get(node_id)
            if isinstance(address, KeeperAddress):
                keepers._handles[node_id], keepers.addresses[node_id] = found[node_id], address
            else:
                end_actor(found[node_id])
        keepers._start_on([n.node_id for n in nodes if n.node_id not in keepers.addresses])
        return keepers

    @classmethod
    def attach(cls, namespace: str) -> "Keepers":
        """The keepers of a run that are there: starts none, fences nobody, speaks for the driver in force."""
        keepers = cls({}, namespace, 0)
        keepers._handles = find_keepers(namespace)
        calls = {node_id: on(h, "address", CONTROL).remote() for node_id, h in keepers._handles.items()}
        for node_id, answer in answers_of(calls, ORDER_SECONDS).items():
            if isinstance(answer, KeeperAddress):
                keepers.addresses[node_id] = answer
        keepers._generation = max((i.generation for i in keepers._inventories().values()), default=0)
        return keepers

    def add(self, node: NodeInfo) -> None:
        """Starts a keeper on a node that came, or whose keeper was lost; a no-op where there is one.

        Raises:
            ClusterError: it does not start.
        """
        if node.node_id not in self.addresses:
            self._start_on([node.node_id])

    def begin(self, node: NodeInfo) -> None:
        """As `add`, but never waits: call it again until the node is in `addresses`."""
        if node.node_id not in self.addresses:
            self._arrive(node.node_id, 0.0)

    def drop(self, node_id: str) -> None:
        """Forgets a keeper whose node, or which itself, is lost; ends it if it lives, also a stopped one: then whoever
        waits for it is freed. Does not wait. No step is collected until `assign` has put another one in its place.
        """
        with self._lock:
            handle = self._handles.pop(node_id, None)
            self.addresses.pop(node_id, None)
            self._pulse.forget(node_id)
            self._polls = {r: p for r, p in self._polls.items() if p[0] != node_id}
        if handle is not None:
            end_actor(handle)

    def close(self) -> None:
        """Ends all keepers of the run and gives their memory back, but not those of a newer driver; idempotent."""
        with self._lock:
            handles = {**self._handles, **find_keepers(self._namespace)}
            self._handles, self.addresses = {}, {}
            self._polls, self._expected, self._ranks = {}, {}, {}
        calls = {n: on(h, "close", CONTROL).remote(by=self._generation) for n, h in handles.items()}
        for node_id, answer in answers_of(calls, COMMIT_SECONDS).items():
            if not isinstance(answer, StaleGenerationError):
                end_actor(handles[node_id])

    def held_bytes(self) -> dict[str, int]:
        """Memory that each reachable keeper holds, by node id."""
        return {node_id: i.bytes for node_id, i in self._inventories().items()}

    # -- steps ------------------------------------------------------------------------------------------------------

    def assign(self, generation: int, node_of_rank: Sequence[str], short: Collection[str] = ()) -> None:
        """Tells the keepers which ranks of a generation are theirs and where replicas go; fences older generations.

        With the same generation as before (a keeper was replaced): steps in flight are expected again.

        Args:
            generation: of the ranks' groups.
            node_of_rank: node id of each rank.
            short: as of `replica_homes`.

        Raises:
            KeeperLost: a keeper does not answer, or a rank's node has none.
            StaleGenerationError: a newer driver has the keepers.
        """
        ranks: dict[str, list[int]] = {}
        for rank, node_id in enumerate(node_of_rank):
            ranks.setdefault(node_id, []).append(rank)
        for node_id in ranks:
            if node_id not in self.addresses:
                raise lost(node_id, "there is none on the node of a rank")
        self._peers = peers = replica_homes(list(ranks), list(self.addresses), short)
        live, same = list(self.addresses.values()), generation == self._assigned
        with self._lock:
            handles, self._generation = dict(self._handles), generation  # before the first one refuses what is older
        peer_of = {node_id: self.addresses.get(peers[node_id] or "") for node_id in handles}
        calls = {
            node_id: on(handle, "assign", CONTROL).remote(generation, ranks.get(node_id, []), peer_of[node_id], live)
            for node_id, handle in handles.items()
        }
        raise_first(self._answers(calls, ORDER_SECONDS))
        if same:  # a keeper that is new gets replicas of steps before it: it would wait for their commits
            if self._committed is not None and self._committed.generation == generation:
                raise_first(self._tell(handles, self._committed, COMMIT_SECONDS))
            if self._abandoned >= 0:
                self.abandon(self._abandoned)
        expected = {step: e.began for step, e in self._expected.items()} if same else {}
        with self._lock:
            self._layouts, self._abandoned = (self._layouts, self._abandoned) if same else (Layouts(), -1)
            self._assigned, self._ranks, self._polls, self._expected = generation, ranks, {}, {}
        for step, began in expected.items():
            self._expect(step, began)

    def expect(self, step: int) -> None:
        """Starts to wait for the images of `step`; `poll` tells when all are there. Any number may be in flight."""
        self._expect(step, time.monotonic())

    def poll(self, timeout: float = 0.0) -> list[Collected]:
        """Steps whose shards are all in since the last call, oldest first.

        Args:
            timeout: seconds to wait for the first.

        Raises:
            KeeperLost: a keeper died or answers no more, also where no step is waited for.
            StaleGenerationError: a newer driver has the keepers.
            CopyRefused: a keeper's peer takes no replica of a step, with the reason.
        """
        deadline = time.monotonic() + timeout
        while True:
            done = self._poll_once(max(0.0, min(deadline - time.monotonic(), 0.5)))
            if done or time.monotonic() >= deadline:
                return done

    def commit(self, manifest: Manifest) -> None:
        """Tells the keepers that a step is committed; waits for the reachable ones, at most `COMMIT_SECONDS`.

        Raises:
            StaleGenerationError: a newer driver has the keepers.
            KeeperLost: not one acknowledged it.
        """
        change = manifest.since(self._committed)
        with self._lock:
            handles = dict(self._handles)
        answers = {} if change is None else self._tell(handles, change, COMMIT_SECONDS)
        behind = {n: h for n, h in handles.items() if change is None or answers[n] is False}
        if behind:  # entries travel once per generation, and to a keeper that came later
            patience = COMMIT_SECONDS + ENTRY_SECONDS * sum(len(s.entries) for s in manifest.shards)
            answers |= self._tell(behind, manifest, patience)
        self._committed = manifest
        failures = {n: a for n, a in answers.items() if isinstance(a, BaseException)}
        for answer in failures.values():
            if isinstance(answer, StaleGenerationError):
                raise answer
        if answers and len(failures) == len(answers):
            raise_first(failures)

    def abandon(self, step: int) -> None:
        """Steps up to this one that are not committed will not be, since a part of their copies is lost: later ones
        need not wait for them.
        """
        with self._lock:
            self._abandoned = max(self._abandoned, step)
            self._expected = {s: e for s, e in self._expected.items() if s > step}
            calls = {n: on(h, "abandon", CONTROL).remote(self._generation, step) for n, h in self._handles.items()}
        self._answers(calls, COMMIT_SECONDS)  # a keeper that does not answer is seen by `poll`

    # -- recovery ---------------------------------------------------------------------------------------------------

    def newest(self, known: Collection[int] | None = None) -> MemoryPoint | None:
        """The newest step that the reachable keepers hold whole; None if there is none. See `newest_point`."""
        with self._lock:
            addresses = dict(self.addresses)
        for ask in (self._answers, answers_of):  # a silent keeper is waited for only where what it may hold is missing
            held = {addresses[n]: i for n, i in self._inventories(ask).items() if n in addresses}
            point = newest_point(held, run_id=str(self._options.get("run_id", "")), known=known)
            if self._committed is None or (point is not None and point.manifest.age >= self._committed.age):
                break
        return point

    def keep_only(self, point: MemoryPoint | None) -> None:
        """The run continues from `point`: everything else in memory is given up; everything, for None.

        Raises:
            KeeperLost: a keeper does not answer.
            StaleGenerationError: a newer driver has the keepers.
        """
        manifest = None if point is None else point.manifest
        arguments = (-1, -1, []) if manifest is None else (*manifest.age, [s.file for s in manifest.shards])
        with self._lock:
            calls = {
                n: on(h, "keep_only", CONTROL).remote(*arguments, by=self._generation) for n, h in self._handles.items()
            }
        raise_first(self._answers(calls, ORDER_SECONDS))

    def kill_process(self, node_id: str, pid: int, started: float) -> bool:
        """Kills a process of a node at once; waits at most a second.

        Args:
            node_id: of the node.
            pid: of the process.
            started: its `psutil.Process(pid).create_time()`.

        Returns:
            False: nobody there: no keeper that answers, or no such process.
        """
        return self._ask_about("kill", node_id, pid, started)

    def is_stopped(self, node_id: str, pid: int, started: float) -> bool:
        """Whether a process of a node was stopped by a signal, as far as known; arguments as of `kill_process`."""
        return self._ask_about("is_stopped", node_id, pid, started)

    def unreachable(self, seconds: float, suspects: Collection[str] = ()) -> list[str]:
        """Nodes whose keeper has died, and those of `suspects` whose keeper does not answer within `seconds`: they are
        gone or cut off. A keeper elsewhere that is merely slow holds copies that nobody should give up, or wait for.
        """
        with self._lock:
            calls = {n: on(h, "address", CONTROL).remote() for n, h in self._handles.items()}
        answers = answers_of({n: c for n, c in calls.items() if n in suspects}, seconds)
        answers |= answers_of({n: c for n, c in calls.items() if n not in answers}, LOOK_SECONDS)
        died = {n for n, a in answers.items() if has_died(a)}
        return [n for n, a in answers.items() if n in died or (n in suspects and not isinstance(a, KeeperAddress))]

    def silent(self) -> dict[str, KeeperAddress]:
        """Keepers that are known to answer no more, by node id."""
        with self._lock:
            return {n: self.addresses[n] for n in self._pulse.silent() if n in self.addresses}

    def beat(self) -> None:
        """Tells the keepers that the driver lives; does not wait. What does not answer is `KeeperLost` in `poll`."""
        with self._lock:
            self._pulse.beat(self._handles, self._generation)

    # -- storage ----------------------------------------------------------------------------------------------------

    def persist(self, manifest: Manifest, folder: str, *, commit: bool = False) -> "Flush":
        """Orders the keepers to write a committed step to storage, beside the run. Call it before the next `commit`:
        from here on the shards stay where they are until they are written.

        Args:
            manifest: of the step.
            folder: of the step on storage.
            commit: the keepers also commit it there; else the caller does, when the flush is done.

        Raises:
            CheckpointError: a shard is held by no keeper that answers.
            StaleGenerationError: a newer driver has the keepers.
        """
        if any((manifest.step, s.file) not in self._where for s in manifest.shards):
            self._look_up(manifest)
        homes = {s.file: self._where.get((manifest.step, s.file), []) for s in manifest.shards}
        with self._lock:
            handles = dict(self._handles)
        return order_flush(handles, manifest, homes, folder, commit=commit, by=self._generation)

    # -- pieces -----------------------------------------------------------------------------------------------------

    def _ask_about(self, method: str, node_id: str, pid: int, started: float) -> bool:
        with self._lock:
            handle = self._handles.get(node_id)
        if handle is None:
            return False
        call = on(handle, method, CONTROL).remote(pid, started, by=self._generation)
        return answers_of({node_id: call}, 1.0)[node_id] is True

    def _start_on(self, node_ids: Sequence[str]) -> None:
        for node_id in [n for n in node_ids if n in self._arrivals]:
            self._arrive(node_id, START_SECONDS)
        left = [n for n in node_ids if n not in self.addresses]
        self._take(start_keepers(left, self._namespace, {**self._options, "generation": self._generation}))

    def _arrive(self, node_id: str, timeout: float) -> None:
        arguments = {**self._options, "generation": self._generation}
        made = self._arrivals.look(node_id, self._namespace, arguments, timeout=timeout)
        self._take({} if made is None else {node_id: made})

    def _take(self, made: Mapping[str, tuple[Any, KeeperAddress]]) -> None:
        with self._lock:
            for node_id, (handle, address) in made.items():
                self._handles[node_id], self.addresses[node_id] = handle, address

    def _expect(self, step: int, began: float) -> None:
        with self._lock:
            self._expected[step] = _Expected(began=began)
            for node_id in self._ranks:
                if node_id in self._handles:
                    self._ask(node_id, step)

    def _tell(self, handles: Mapping[str, Any], what: Manifest | ManifestChange, patience: float) -> dict[str, Any]:
        shared = ray.put(what)
        return self._answers({n: on(h, "commit", CONTROL).remote(shared) for n, h in handles.items()}, patience)

    def _ask(self, node_id: str, step: int) -> None:
        call = on(self._handles[node_id], "collect", COLLECT)
        known = self._layouts.sums(self._generation, self._ranks[node_id])
        self._polls[call.remote(self._generation, step, POLL_SECONDS, known)] = (node_id, step, time.monotonic())

    def _poll_once(self, timeout: float) -> list[Collected]:
        with self._lock:
            references = list(self._polls)
        ready = answered(references, timeout)
        now = time.monotonic()
        answers = {r: answers_of({"": r}, 0.0)[""] for r in ready}
        with self._lock:
            for reference, answer in answers.items():
                node_id, step, _ = self._polls.pop(reference, ("", -1, 0.0))
                if step not in self._expected or node_id not in self._handles:
                    continue
                if isinstance(answer, StaleGenerationError):
                    raise answer
                if isinstance(answer, ClusterError):
                    raise CopyRefused(answer.message, fix=answer.fix, step=step, node_id=node_id)
                self._pulse.note(node_id, answer)
                if isinstance(answer, list):
                    self._expected[step].answers[node_id] = [self._layouts.whole(told) for told in answer]
                else:
                    self._ask(node_id, step)
            for node_id, _, asked in self._polls.values():
                self._pulse.waits(node_id, asked, POLL_SECONDS + ORDER_SECONDS)
            self._pulse.check()
            return self._complete_steps(now)

    def _complete_steps(self, now: float) -> list[Collected]:
        done: list[Collected] = []
        for step in sorted(self._expected):
            expected = self._expected[step]
            if set(expected.answers) != set(self._ranks):
                continue
            del self._expected[step]
            by_rank: dict[int, ShardRecord] = {}
            for node_id, records in expected.answers.items():
                by_rank.update(zip(self._ranks[node_id], records, strict=True))
                homes = [n for n in (node_id, self._peers.get(node_id)) if n in self.addresses]
                self._where |= {(step, record.file): list(homes) for record in records}
            shards = tuple(by_rank[rank] for rank in sorted(by_rank))
            done.append(
                Collected(step=step, shards=shards, bytes=sum(s.bytes for s in shards), seconds=now - expected.began)
            )
            oldest = sorted({key[0] for key in self._where})[-4:][0]
            self._where = {key: homes for key, homes in self._where.items() if key[0] >= oldest}
        return done

    def _answers(self, calls: Mapping[str, Any], patience: float) -> dict[str, Any]:
        """As `answers_of`, but nobody waits for a keeper that is known to be silent."""
        return answers_but(calls, patience, silent=self.silent)

    def _inventories(self, ask: Ask = answers_of) -> dict[str, Inventory]:
        with self._lock:
            calls = {n: on(h, "inventory", CONTROL).remote() for n, h in self._handles.items()}
        answers = ask(calls, SETTLE_SECONDS + COMMIT_SECONDS)
        return {n: a for n, a in answers.items() if isinstance(a, Inventory)}

    def _look_up(self, manifest: Manifest) -> None:
        for node_id, inventory in self._inventories().items():
            for shard in inventory.shards:
                homes = self._where.setdefault((shard.step, shard.record.file), [])
                if node_id not in homes:
                    homes.insert(len(homes) if shard.replica else 0, node_id)
