"""Double rings and K/V caches against the fp64 oracle; buffers in flight are audited; planted faults must show."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycp.attention import InMemoryWorld, exchange
from raycp.attention.communicator import Communicator, Handle, Message
from tests.unit.attention.cases import (
    TOLERANCE,
    Case,
    assert_bytes_as_planned,
    count_in_memory,
    errors,
    random_case,
    run_in_memory,
)

RINGS = [(3, 3), (4, 2), (4, 4), (5, 5), (6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (10, 5)]
"""Ranks, ranks of a window."""
LONG = Case((1, 90, 1, 33, 7), 6, inner=3)


def _worst(case: Case, **how: Any) -> float:
    return max(errors(case, run_in_memory(case, **how)).values())


@pytest.mark.parametrize(("ring", "inner"), RINGS)
def test_every_window_that_divides_the_ring(ring: int, inner: int) -> None:
    rng = random.Random(ring * 10 + inner)
    for _ in range(8):
        case = replace(random_case(rng, max_ring=1), ring=ring, inner=inner, kv_cache=rng.choice(["none", "full"]))
        found = errors(case, run_in_memory(case))
        assert max(found.values()) <= TOLERANCE, (case, found)


@pytest.mark.parametrize(("ring", "inner"), [(4, 2), (6, 3)])
def test_double_ring_inside_hybrid(ring: int, inner: int) -> None:
    for lengths in ((97,), (5, 1, 64, 3)):
        case = Case(lengths, ring, 9, 3, 8, 12, "balanced", ulysses=2, inner=inner)
        assert case.plan().algorithm == "hybrid"
        assert _worst(case) <= TOLERANCE, case
        assert_bytes_as_planned(case)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced"])
@pytest.mark.parametrize("options", [{}, {"mask": "full"}, {"window": 17}])
@pytest.mark.parametrize("kv_cache", ["none", "half", "full"])
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_bytes_are_as_planned_and_few_blocks_are_held(
    layout: str, options: dict[str, Any], kv_cache: str, inner: int
) -> None:
    case = replace(LONG, layout=layout, kv_cache=kv_cache, inner=inner, **options)
    for counted in assert_bytes_as_planned(case):
        if kv_cache == "none":
            assert counted.after.max_remote_blocks <= (2 if inner == 1 else 3)
            assert counted.between.remote_blocks == 0


def test_three_blocks_are_held_and_not_four() -> None:
    assert max(c.after.max_remote_blocks for c in count_in_memory(replace(LONG, ring=8, inner=4))) == 3


@pytest.mark.parametrize("inner", [1, 3])
def test_cache_holds_what_it_says_and_moves_no_bit(inner: int) -> None:
    case = replace(LONG, inner=inner, num_kv_heads=2, value_dim=12)
    plain = run_in_memory(case)
    none, half, full = (count_in_memory(replace(case, kv_cache=policy)) for policy in ("none", "half", "full"))
    for rank in range(case.ring):
        program = case.plan().program(rank)
        rows = program.rows_received
        blocks = sum(bool(step.receives) for step in program.steps)
        assert none[rank].between.remote_bytes == 0
        assert half[rank].between.remote_bytes == rows * 2 * 8 * 4
        assert full[rank].between.remote_bytes == rows * 2 * (8 + 12) * 4
        assert half[rank].between.remote_blocks == full[rank].between.remote_blocks == blocks
        returned = program.rows_returned * 2 * (8 + 12) * 4
        sent = program.rows_sent * 2 * 4
        assert none[rank].backward == sent * (8 + 12) + returned
        assert half[rank].backward == sent * 12 + returned
        assert full[rank].backward == returned
    for policy in ("half", "full"):
        for a, b in zip(plain, run_in_memory(replace(case, kv_cache=policy)), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_nothing_is_cached_without_a_backward() -> None:
    for counted in count_in_memory(replace(LONG, kv_cache="full"), grad=False):
        assert counted.after.remote_blocks == 0
        assert counted.after.max_remote_blocks <= 3


class _Auditing:
    """Refuses a message whose buffer overlaps that of another message in flight, unless both are only read."""

    def __init__(self, inner: Communicator) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.flying: list[tuple[int, int, bool]] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        mine = [(m.tensor, written) for ms, written in ((sends, False), (receives, True)) for m in ms]
        entries = []
        for tensor, written in mine:
            assert tensor.is_contiguous()
            entry = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, written)
            for start, stop, other in (*self.flying, *entries):
                apart = entry[1] <= start or stop <= entry[0]
                assert apart or not (written or other), "a buffer is shared by two messages in flight"
            entries.append(entry)
        self.flying += entries
        return _Audited(self, entries, self.inner.post(sends, receives))


class _Audited:
    def __init__(self, auditor: _Auditing, entries: list[tuple[int, int, bool]], handle: Handle) -> None:
        self.auditor, self.entries, self.handle = auditor, entries, handle

    def wait(self) -> None:
        self.handle.wait()
        for entry in self.entries:
            self.auditor.flying.remove(entry)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(3, 1), (5, 1), (6, 2), (6, 3), (8, 4)]),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    layout=st.sampled_from(["zigzag", "contiguous", "balanced"]),
    algorithm=st.sampled_from(["ring", "ring", "allgather"]),
    kv_cache=st.sampled_from(["none", "half", "full"]),
    seed=st.integers(0, 99),
)
def test_delayed_messages_share_no_buffer(
    shape: tuple[int, int], lengths: list[int], layout: str, algorithm: str, kv_cache: str, seed: int
) -> None:
    ring, inner = shape
    if algorithm == "allgather":
        inner, kv_cache = 1, "none"
    case = Case(tuple(lengths), ring, layout=layout, algorithm=algorithm, inner=inner, kv_cache=kv_cache)
    world = InMemoryWorld(ring, delay=0.001, seed=seed)
    assert _worst(case, world=world, wrap=_Auditing) <= TOLERANCE


@pytest.mark.parametrize("audited", [True, False])
def test_two_buffers_for_three_blocks_show(monkeypatch: pytest.MonkeyPatch, audited: bool) -> None:
    """Planted fault: a pool of two buffers, which is enough for a single ring only."""
    pools: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}

    def from_pool(like: torch.Tensor, rows: int) -> torch.Tensor:
        import threading

        shape = (rows, *like.shape[1:])
        pool = pools.setdefault((threading.get_ident(), shape), [])
        if len(pool) < 4:  # two for K, two for V
            pool.append(like.new_empty(shape))
            return pool[-1]
        pool.append(pool.pop(0))
        return pool[-1]

    case = Case((96,), 6, mask="full", layout="contiguous", inner=3)
    monkeypatch.setattr(exchange, "empty_rows", from_pool)
    assert _worst(replace(case, inner=1)) <= TOLERANCE
    pools.clear()
    if audited:
        with pytest.raises(AssertionError, match="shared by two messages"):
            _worst(case, wrap=_Auditing)
    else:
        assert _worst(case) > 1e-2


def test_stale_buffer_shows() -> None:
    assert _worst(LONG) <= TOLERANCE
    assert _worst(LONG, world=InMemoryWorld(6, stale=True)) > 1e-2


def test_lost_gradients_of_a_passed_block_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the rank that pulled a block for its window returns its own share only."""
    honest = exchange.Returning.add_to
    monkeypatch.setattr(
        exchange.Returning,
        "add_to",
        lambda self, totals: honest(self, totals if self._step.into == 0 else tuple(x.clone() for x in totals)),
    )
    found = errors(LONG, run_in_memory(LONG))
    assert found["out"] <= TOLERANCE
    assert min(found["dk"], found["dv"]) > 1e-2
