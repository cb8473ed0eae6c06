from collections.abc import Sequence

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from raycp.attention import (
    ATTENTION_NAME,
    Carrier,
    Groups,
    InMemoryWorld,
    attention_forward,
    build_groups,
    register_attention,
)
from raycp.attention.communicator import Communicator
from raycp.attention.kernels import CpuFlashKernel
from raycp.errors import ModelError
from raycp.plan import AttentionPlan, RankGrid, Slice
from tests.unit.attention.cases import Case, groups_in_memory
from tests.unit.attention.llama import NUM_LAYERS, hidden_and_gradient, llama_plan, positions, tiny_llama, token_ids

ENDS = [7, 30, 31, 45]


class _Layer(torch.nn.Module):
    layer_idx = 1
    is_causal = True


def _carrier(ends: list[int] | None = None, **options: object) -> Carrier:
    return Carrier(llama_plan(ENDS if ends is None else ends, 1), build_groups(RankGrid(1, 1)), **options)  # type: ignore[arg-type]


def _qkv(rows: int = 45) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, rows, 8, generator=generator) for heads in (4, 2, 2)]


def _pack_by_pieces(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The same documents one by one through Hugging Face's own attention: [T, h]."""
    starts = [0, *ENDS[:-1]]
    parts = [
        model.base_model(ids[a:b][None], use_cache=False).last_hidden_state[0]
        for a, b in zip(starts, ENDS, strict=True)
    ]  # type: ignore[union-attr,operator]
    return torch.cat(parts)


def test_pack_through_llama_equals_its_documents_one_by_one() -> None:
    ids = token_ids(ENDS)
    hidden, _, carrier = hidden_and_gradient(tiny_llama(), ids, llama_plan(ENDS, 1), build_groups(RankGrid(1, 1)))
    with torch.no_grad():
        expected = _pack_by_pieces(tiny_llama(attention="sdpa"), ids)
    assert torch.allclose(hidden, expected, rtol=0, atol=2e-6)
    assert carrier.calls == dict.fromkeys(range(NUM_LAYERS), 1)
    joined, _, _ = hidden_and_gradient(tiny_llama(), ids, llama_plan([30, 31, 45], 1), build_groups(RankGrid(1, 1)))
    assert not torch.allclose(joined, expected, rtol=0, atol=1e-3), "planted fault: joined documents must show"


def test_a_changed_token_changes_no_bit_of_other_documents() -> None:
    ids = token_ids(ENDS)
    changed = ids.clone()
    changed[3] = (ids[3] + 1) % 64
    groups = build_groups(RankGrid(1, 1))
    plan = llama_plan(ENDS, 1)
    before = hidden_and_gradient(tiny_llama(), ids, plan, groups)
    after = hidden_and_gradient(tiny_llama(), changed, plan, groups)
    for x, y in zip(before[:2], after[:2], strict=True):
        assert not torch.equal(x[:7], y[:7])
        assert torch.equal(x[7:], y[7:])
    leaky = llama_plan([30, 31, 45], 1)
    before, after = (hidden_and_gradient(tiny_llama(), x, leaky, groups) for x in (ids, changed))
    assert not torch.equal(before[0][7:], after[0][7:]), "planted fault: joined documents must show"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_no_attention_and_changes_no_bit(reentrant: bool) -> None:
    ids, plan, groups = token_ids(ENDS), llama_plan(ENDS, 1), build_groups(RankGrid(1, 1))
    plain = tiny_llama()
    expected = hidden_and_gradient(plain, ids, plan, groups)
    for keep, forward_calls in ((True, NUM_LAYERS), (False, 2 * NUM_LAYERS)):
        model = tiny_llama()
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found = hidden_and_gradient(model, ids, plan, groups, keep=keep)
        carrier = found[2]
        assert carrier.stats.kernel_forward_calls == forward_calls
        assert carrier.stats.kernel_backward_calls == NUM_LAYERS
        assert carrier.calls == dict.fromkeys(range(NUM_LAYERS), 2)
        assert not carrier.kept
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        for a, b in zip(plain.base_model.parameters(), model.base_model.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)


def test_what_is_kept_is_what_backward_uses() -> None:
    """Planted fault: a kept output of another layer must show."""
    carrier = _carrier(keep=True)
    q, k, v = _qkv()
    q.requires_grad_()

    def run(q: torch.Tensor) -> torch.Tensor:
        out, _ = attention_forward(_Layer(), q, k, v, None, scaling=0.3, cp_plan=carrier)
        return out

    def gradient(spoil: bool) -> torch.Tensor:
        carrier.calls.clear()
        out = checkpoint(run, q, use_reentrant=False)
        if spoil:
            carrier.kept[1] = (carrier.kept[1][0] * 2, *carrier.kept[1][1:])
        (grad,) = torch.autograd.grad(out.square().sum(), q)
        return grad

    assert torch.equal(gradient(False), gradient(False))
    assert not torch.allclose(gradient(False), gradient(True), rtol=0, atol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("options", [{}, {"kv_cache": "half"}, {"kv_cache": "full"}, {"algorithm": "allgather"}])
def test_checkpointed_layers_of_a_ring_keep_what_they_cached(
    options: dict[str, str], keep: bool, reentrant: bool
) -> None:
    """Recomputation takes output, statistics and cached blocks from the carrier, and moves nothing."""
    plan = AttentionPlan.build([45], RankGrid(1, 2), num_heads=4, num_kv_heads=2, layout="zigzag", **options)  # type: ignore[arg-type]

    def rank(communicator: Communicator, checkpointed: bool) -> tuple[list[torch.Tensor], Carrier]:
        index = torch.from_numpy(plan.token_index(communicator.rank))
        leaves = [x[:, :, index].requires_grad_() for x in _qkv()]
        carrier = Carrier(plan, Groups(plan.grid, communicator.rank, communicator), keep=keep and checkpointed)

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            return attention_forward(_Layer(), *tensors, None, cp_plan=carrier)[0]  # type: ignore[arg-type]

        out = checkpoint(run, *leaves, use_reentrant=reentrant) if checkpointed else run(*leaves)
        out.square().sum().backward()
        return [out.detach(), *(x.grad for x in leaves)], carrier

    plain, again = (InMemoryWorld(2).run(lambda c, x=x: rank(c, x)) for x in (False, True))
    for (a, first), (b, second) in zip(plain, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert second.stats.kernel_forward_calls == (1 if keep else 2) * first.stats.kernel_forward_calls
        assert not second.kept
        assert first.stats.remote_blocks == second.stats.remote_blocks == 0
        if keep:
            assert second.stats.bytes_sent == first.stats.bytes_sent


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case((45,), 2),
        Case((30, 15), 2, kv_cache="half"),
        Case((45,), 4, inner=2, kv_cache="full"),
        Case((45,), 2, algorithm="allgather"),
        Case((30, 15), 1, ulysses=2),
        Case((45,), 1, 9, 3, 8, 12, ulysses=2),
        Case((40, 1, 20), 2, ulysses=2, dtype=torch.bfloat16),
        Case((40, 1, 20), 2, 9, 3, 8, 12, ulysses=2, kv_cache="full"),
    ],
    ids=lambda case: f"{case.plan().algorithm}-{case.num_heads}-{case.kv_cache}",
)
def test_recomputed_attention_moves_nothing_twice(case: Case, reentrant: bool) -> None:
    """Under checkpointing each rank sends what its plan says, forward and backward, and no bit changes."""
    plan = case.plan()
    world = InMemoryWorld(plan.grid.cp)
    sizes = {"head_dim": case.head_dim, "value_dim": case.value_dim, "itemsize": case.dtype.itemsize}

    def rank(whole: Communicator, checkpointed: bool, keep: bool) -> tuple[list[torch.Tensor], list[int]]:
        index = torch.from_numpy(plan.token_index(whole.rank))
        *tensors, dout = (x[index] for x in case.tensors())
        leaves = [x.requires_grad_() for x in tensors]
        carrier = Carrier(plan, groups_in_memory(world, plan.grid, whole.rank), keep=keep)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return carrier.attend(0, q, k, v, 0.3) ** 3  # whose backward needs the output

        out = checkpoint(run, *leaves, use_reentrant=reentrant) if checkpointed else run(*leaves)
        sent = [carrier.stats.bytes_sent]
        out.backward(dout)
        assert not carrier.kept
        found = [out.detach(), *(x.grad for x in leaves)]
        return found, [*sent, carrier.stats.bytes_sent - sent[0]]

    plain, kept, forgotten = (
        world.run(lambda c, how=how: rank(c, *how)) for how in ((False, False), (True, True), (True, False))
    )
    for cp_rank, ((a, _), (b, sent), (_, sent_again)) in enumerate(zip(plain, kept, forgotten, strict=True)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        planned = [plan.bytes_moved(cp_rank, **sizes, direction=d) for d in ("forward", "backward")]
        assert sent == planned
        assert sent_again[1] > planned[1], "planted fault: without keep, attention is run and moved again"


def test_second_forward_with_one_carrier_is_refused() -> None:
    carrier = _carrier(keep=True)
    attention_forward(_Layer(), *_qkv(), None, cp_plan=carrier)
    with pytest.raises(ModelError, match="second forward pass") as error:
        attention_forward(_Layer(), *_qkv(), None, cp_plan=carrier)
    assert "new Carrier" in error.value.fix


def test_progress_names_layer_and_step() -> None:
    seen: list[tuple[int, int]] = []
    groups = build_groups(RankGrid(1, 1))
    hidden_and_gradient(
        tiny_llama(),
        token_ids(ENDS),
        llama_plan(ENDS, 1),
        groups,
        on_layer=lambda layer, step: seen.append((layer, step)),
    )
    assert seen == [(0, 0), (1, 0), (1, 0), (0, 0)]


def test_scaling_of_the_model_is_used() -> None:
    scales: list[float] = []

    class Recording(CpuFlashKernel):
        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slices: Sequence[Slice], scale: float
        ) -> tuple[torch.Tensor, torch.Tensor]:
            scales.append(scale)
            return super().forward(q, k, v, slices, scale)

    kernel = Recording()
    attention_forward(_Layer(), *_qkv(), None, scaling=0.125, cp_plan=_carrier(kernel=kernel))
    attention_forward(_Layer(), *_qkv(), None, cp_plan=_carrier(kernel=kernel))
    assert scales == [0.125, 8**-0.5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention_mask": torch.ones(1, 1, 45, 45)}, "mask tensor of shape"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"sliding_window": 22}, "sliding_window=22, the plan has sliding_window=None"),
        ({"softcap": 50.0}, "softcap=50.0"),
        ({"s_aux": torch.zeros(4)}, "s_aux=a tensor"),
        ({"output_attentions": True}, "output_attentions=True"),
        ({"cu_seq_lens_q": torch.zeros(3)}, "cu_seq_lens_q=a tensor"),
        ({"something_new": 1}, "something_new=1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"cp_plan": None}, "cp_plan=NoneType"),
        ({"cp_plan": "plan"}, "cp_plan=str"),
    ],
)
def test_what_raycp_does_not_compute_is_refused_by_name(options: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        attention_forward(_Layer(), *_qkv(), **{"attention_mask": None, "cp_plan": _carrier(), **options})  # type: ignore[arg-type]
    assert error.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": None, "softcap": None, "s_aux": None},
        {"sliding_window": 23},
        {"position_ids": positions(ENDS), "use_cache": False, "is_causal": True},
        {"output_attentions": False, "is_causal": None},
    ],
)
def test_options_without_effect_are_accepted(options: dict[str, object]) -> None:
    plain = attention_forward(_Layer(), *_qkv(), None, cp_plan=_carrier())[0]
    assert plain.shape == (1, 45, 4, 8)
    assert torch.equal(attention_forward(_Layer(), *_qkv(), None, cp_plan=_carrier(), **options)[0], plain)  # type: ignore[arg-type]


def test_window_of_the_model_must_be_that_of_the_plan() -> None:
    plan = AttentionPlan.build(ENDS, RankGrid(1, 1), num_heads=4, num_kv_heads=2, sliding_window=9)
    groups = build_groups(RankGrid(1, 1))
    plain = attention_forward(_Layer(), *_qkv(), None, cp_plan=_carrier())[0]
    found = attention_forward(_Layer(), *_qkv(), None, cp_plan=Carrier(plan, groups), sliding_window=9)[0]
    assert torch.allclose(found[:, :7], plain[:, :7], rtol=0, atol=1e-6)
    assert not torch.allclose(found, plain, rtol=0, atol=1e-2)
    for options in ({}, {"sliding_window": 10}):
        with pytest.raises(ModelError, match="the plan has sliding_window=9"):
            attention_forward(_Layer(), *_qkv(), None, cp_plan=Carrier(plan, groups), **options)


def test_batches_and_layers_without_a_number_are_refused() -> None:
    q, k, v = _qkv()
    with pytest.raises(ModelError, match="batch of 2 rows"):
        attention_forward(_Layer(), q.expand(2, -1, -1, -1), k, v, None, cp_plan=_carrier())
    with pytest.raises(ModelError, match="no layer_idx"):
        attention_forward(torch.nn.Module(), q, k, v, None, cp_plan=_carrier())


def test_model_without_carrier_teaches() -> None:
    with pytest.raises(ModelError, match="needs the plan of the pack") as error:
        tiny_llama()(torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert "Carrier(plan, groups)" in error.value.fix


def test_two_dimensional_mask_does_not_turn_isolation_off() -> None:
    """It does in transformers' own attention; for a name without a mask function, transformers 5.24 drops it."""
    ids, plan, groups = token_ids(ENDS), llama_plan(ENDS, 1), build_groups(RankGrid(1, 1))
    found = tiny_llama().base_model(
        ids[None],
        attention_mask=torch.ones(1, 45),
        position_ids=positions(ENDS)[None],
        use_cache=False,
        cp_plan=Carrier(plan, groups),
    )
    assert torch.equal(found.last_hidden_state[0], hidden_and_gradient(tiny_llama(), ids, plan, groups)[0])


def test_registering_again_has_no_effect() -> None:
    assert register_attention() == register_attention() == ATTENTION_NAME
    from transformers import AttentionInterface

    assert AttentionInterface()[ATTENTION_NAME] is attention_forward
