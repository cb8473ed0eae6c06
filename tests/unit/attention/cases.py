"""Random packs, the fp64 oracle's answer to them, and the error measure: shared by tests in threads and in processes.

Legend: T tokens of the pack, t of a rank, H query heads, K key/value heads, D head dim, Dv value dim.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from raycp.attention import AttentionStats, Groups, InMemoryWorld, cp_attention
from raycp.attention.api import make_call, run_call
from raycp.attention.communicator import Communicator
from raycp.attention.kernels import Kernel
from raycp.attention.kernels.reference import dense_attention, sawtooth
from raycp.plan import AttentionPlan, RankGrid
from raycp.plan.checks import resolve_algorithm

TOLERANCE = 2e-6
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One pack and one way to split it; `algorithm` "" is the one that the grid means: ring, ulysses or hybrid."""

    lengths: tuple[int, ...]
    ring: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    layout: str = "zigzag"
    mask: str = "causal"
    seed: int = 0
    dtype: torch.dtype = torch.float32
    amplitude: float = 1.0
    window: int | None = None
    ulysses: int = 1
    algorithm: str = ""
    inner: int = 1
    kv_cache: str = "none"

    @property
    def doc_ends(self) -> list[int]:
        return list(accumulate(self.lengths))

    def plan(self) -> AttentionPlan:
        grid = RankGrid(1, self.ring, self.ulysses, self.inner)
        return AttentionPlan.build(
            self.doc_ends,
            grid,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            layout=self.layout,
            mask=self.mask,
            sliding_window=self.window,
            algorithm=self.algorithm or resolve_algorithm("auto", grid, self.num_heads),
            kv_cache=self.kv_cache,
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k [T, K, D], v [T, K, Dv] and dout [T, H, Dv]."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (
            (self.num_heads, self.head_dim),
            (self.num_kv_heads, self.head_dim),
            (self.num_kv_heads, self.value_dim),
            (self.num_heads, self.value_dim),
        )
        q, k, v, dout = (torch.randn(sum(self.lengths), *s, generator=generator).to(self.dtype) for s in shapes)
        return q * self.amplitude, k, v, dout


def random_case(rng: random.Random, *, max_ring: int, max_tokens: int = 120) -> Case:
    kinds: list[Callable[[], list[int]]] = [
        lambda: [rng.randint(1, max_tokens)],
        lambda: [1] * rng.randint(1, 12),
        lambda: [rng.randint(1, max_tokens // 6) for _ in range(rng.randint(1, 6))],
        lambda: [1, rng.randint(max_tokens // 2, max_tokens), 1, rng.randint(1, 9)],
    ]
    num_kv_heads = rng.choice([1, 1, 2, 3])
    mask = rng.choice(["causal", "causal", "full"])
    head_dim = rng.choice([4, 8, 16])
    return Case(
        lengths=tuple(rng.choice(kinds)()),
        ring=rng.randint(1, max_ring),
        num_heads=num_kv_heads * rng.choice([1, 2, 4]),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=rng.choice([head_dim, head_dim, 6, 12]),
        layout=rng.choice(["zigzag", "contiguous", "balanced", "auto"]),
        algorithm=rng.choice(["", "", "auto"]),
        mask=mask,
        seed=rng.randrange(1 << 30),
        window=rng.choice([None, None, rng.randint(1, max_tokens)]) if mask == "causal" else None,
    )


def expected(case: Case) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv of one device, fp64."""
    q, k, v, dout = case.tensors()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    visible = sawtooth(case.doc_ends, causal=case.mask == "causal", window=case.window)
    out = dense_attention(*leaves, visible, case.head_dim**-0.5)
    out.backward(dout.double())
    grads = [x.grad for x in leaves]
    return out.detach(), *(g for g in grads if g is not None)


def run_rank(
    case: Case, groups: Groups, *, plan: AttentionPlan | None = None, kernel: Kernel | None = None
) -> tuple[torch.Tensor, ...]:
    """This rank's out, dq, dk, dv: [t, ...]."""
    plan = case.plan() if plan is None else plan
    index = torch.from_numpy(plan.token_index(groups.cp_rank))
    q, k, v, dout = (x[index] for x in case.tensors())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = cp_attention(*leaves, plan=plan, groups=groups, kernel=kernel)
    assert out.dtype == case.dtype
    out.backward(dout)
    grads = [x.grad for x in leaves]
    return out.detach(), *(g for g in grads if g is not None)


def gather(case: Case, parts: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Shards of all ranks back in pack order, fp64."""
    plan = case.plan()
    order = torch.cat([torch.from_numpy(plan.token_index(rank)) for rank in range(plan.grid.cp)])
    whole = []
    for shards in zip(*parts, strict=True):
        x = torch.cat(shards).double()
        whole.append(torch.empty_like(x).index_copy_(0, order, x))
    return tuple(whole)


def errors(case: Case, parts: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, float]:
    """norm(x - ref) / max(norm(ref), 1e-3 norm(dout)) of the whole tensors."""
    floor = 1e-3 * case.tensors()[3].double().norm()
    pairs = zip(NAMES, gather(case, parts), expected(case), strict=True)
    return {name: float((x - ref).norm() / torch.maximum(ref.norm(), floor)) for name, x, ref in pairs}


def run_in_memory(
    case: Case,
    *,
    world: InMemoryWorld | None = None,
    plan: AttentionPlan | None = None,
    kernel: Kernel | None = None,
    wrap: Callable[[Communicator], Communicator] = lambda ring: ring,
) -> list[tuple[torch.Tensor, ...]]:
    """out, dq, dk, dv of every rank, each rank a thread; `wrap` goes around the communicator of the ring."""
    grid = case.plan().grid
    world = InMemoryWorld(grid.cp) if world is None else world

    def rank(whole: Communicator) -> tuple[torch.Tensor, ...]:
        groups = groups_in_memory(world, grid, whole.rank)
        ring = wrap(groups.communicator)
        return run_rank(case, replace(groups, communicator=ring, outer=ring), plan=plan, kernel=kernel)

    return world.run(rank)


@dataclass(frozen=True)
class Counted:
    """What one rank counted: bytes of each direction, and the stats after forward and after backward."""

    forward: int
    backward: int
    between: AttentionStats
    after: AttentionStats


def count_in_memory(case: Case, *, grad: bool = True) -> list[Counted]:
    """Bytes and stats of every rank; the graph is released at the end."""
    plan = case.plan()
    world = InMemoryWorld(plan.grid.cp)

    def rank(whole: Communicator) -> Counted:
        groups = groups_in_memory(world, plan.grid, whole.rank)
        index = torch.from_numpy(plan.token_index(whole.rank))
        q, k, v, dout = (x[index] for x in case.tensors())
        leaves = [x.requires_grad_(grad) for x in (q, k, v)]
        stats = AttentionStats()
        call = replace(make_call(*leaves, plan=plan, groups=groups, scale=None, kernel=None), stats=stats)
        out = run_call(*leaves, plan=plan, groups=groups, call=call)
        between = replace(stats)
        if grad:
            out.backward(dout)
        return Counted(between.bytes_sent, stats.bytes_sent - between.bytes_sent, between, stats)

    return world.run(rank)


def assert_bytes_as_planned(case: Case) -> list[Counted]:
    """Runs a case; what every rank hands to the communicator is what its plan says."""
    plan, counted = case.plan(), count_in_memory(case)
    sizes = {"head_dim": case.head_dim, "value_dim": case.value_dim, "itemsize": case.dtype.itemsize}
    for cp_rank, found in enumerate(counted):
        assert found.forward == plan.bytes_moved(cp_rank, **sizes)
        assert found.backward == plan.bytes_moved(cp_rank, **sizes, direction="backward")
        assert found.after.remote_blocks == found.after.remote_bytes == 0
    return counted


def groups_in_memory(world: InMemoryWorld, grid: RankGrid, rank: int) -> Groups:
    """As `build_groups`, of a rank of one replica."""
    _, ring_index, ulysses_index = grid.coordinates(rank)
    ring = world.communicator(rank, grid.ring_ranks(0, ulysses_index))
    return Groups(grid, rank, ring, (), world.communicator(rank, grid.ulysses_ranks(0, ring_index)), ring)
