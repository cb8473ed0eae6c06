"""Shared by the training tests: steps of a tiny Llama on a grid, and the same steps on one device.

The reference is another code path: Hugging Face's own sdpa attention, one document at a time, no packing, no sharding,
no chunked loss, plain autograd, in fp64. Faults are planted by wrapping what a step is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, PreTrainedModel

from raycp.attention import Carrier, Groups, build_groups
from raycp.attention.communicator import Communicator, Handle, Message
from raycp.config import OptimConfig
from raycp.plan import RankGrid
from raycp.training.layers import split_of
from raycp.training.loss import IGNORE
from raycp.training.mesh import build_mesh
from raycp.training.model import Trainee, build_trainee
from raycp.training.optim import build_optimizer, clip_by_global_norm, sum_over_ranks
from raycp.training.sharding import named_weights
from raycp.training.spec import ModelSpec
from raycp.training.weights import empty_model, fill

CPU = torch.device("cpu")
SEED = 11


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Two layers, GQA, odd sizes, so that shards are uneven."""
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**{**fields, **changes})


@dataclass(frozen=True)
class TestPack:
    """One pack: ids, targets, position_ids int64 [T]; weights fp32 [T] or None."""

    __test__ = False

    ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    weights: torch.Tensor | None
    doc_ends: tuple[int, ...]


def make_pack(
    lengths: Sequence[int], seed: int, *, weighted: bool = False, trained: Sequence[int] | None = None
) -> TestPack:
    """Random documents of these lengths; only those listed in `trained` have targets (default: all)."""
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(3, 97, (total,), generator=g)
    targets = torch.full((total,), IGNORE)
    position_ids = torch.empty(total, dtype=torch.int64)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        start = end - length
        position_ids[start:end] = torch.arange(length)
        if trained is None or i in trained:
            targets[start : end - 1] = ids[start + 1 : end]
    weights = torch.rand(total, generator=g) + 0.5 if weighted else None
    return TestPack(ids, targets, position_ids, weights, tuple(ends))


LENGTHS = ([5, 1, 23, 18], [41], [3, 3, 2, 1, 1, 30], [9, 16], [1, 1, 1], [33, 7])


def make_step(num_packs: int, *, weighted: bool = False, sparse: bool = False) -> list[TestPack]:
    """Packs of one step. `sparse`: only the first, short documents have targets, so that shards have none."""
    return [
        make_pack(LENGTHS[i % len(LENGTHS)], 100 + i, weighted=weighted, trained=(0,) if sparse else None)
        for i in range(num_packs)
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer step on one grid."""

    dp: int = 1
    cp: int = 1
    packs: int = 2
    tied: bool = False
    weighted: bool = False
    sparse: bool = False
    checkpointing: bool = False
    shard: str = "full"
    layout: str = "zigzag"
    once: bool = False
    """Each micro-batch says whether it is the last."""
    fault: str = ""

    @property
    def data(self) -> tuple[bool, int, bool, bool]:
        """What decides the numbers: two cases with the same `data` must agree."""
        return self.tied, self.packs, self.weighted, self.sparse


@dataclass
class Result:
    """Whole (unsharded) tensors of one step."""

    loss: float
    norm: float
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)
    update: dict[str, torch.Tensor] = field(default_factory=dict)


SGD = OptimConfig(name="sgd", lr=1.0, clip=None)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, copied. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trainee_on(grid: RankGrid, spec: ModelSpec, **changes: Any) -> Trainee:
    """A Trainee on all ranks. Collective."""
    options: dict[str, Any] = {
        "shard": "full",
        "dtype": "float32",
        "activation_checkpointing": False,
        "loss_chunk": 7,
        "seed": SEED,
    }
    return build_trainee(spec, mesh=build_mesh(grid.world_size, "cpu"), device=CPU, **{**options, **changes})


class StaleCommunicator:
    """Planted fault: what is received never reaches the K/V buffer, which keeps what it held."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Handle:
        if any(m.name == "hash of the plan" for m in receives):
            return self._inner.post(sends, receives)
        for m in receives:
            m.tensor.zero_()
        lost = [Message(m.peer, torch.empty_like(m.tensor), m.tag, m.name) for m in receives]
        return self._inner.post(sends, lost)


def micro_batch_loss(
    trainee: Trainee,
    pack: TestPack,
    grid: RankGrid,
    groups: Groups,
    scale: float,
    *,
    layout: str = "zigzag",
    last: bool = True,
    fault: str = "",
) -> torch.Tensor:
    """This rank's share of the loss of one pack."""
    ends = (pack.doc_ends[-1],) if fault == "leaked document" else pack.doc_ends
    plan = trainee.layers.plan(ends, grid, layout=layout, algorithm="ring")
    index = torch.from_numpy(split_of(plan).token_index(groups.cp_rank))
    carrier = Carrier(plan, groups, keep=trainee.activation_checkpointing)
    weights = None if pack.weights is None else pack.weights[index]
    loss: torch.Tensor = trainee(
        pack.ids[index], pack.position_ids[index], pack.targets[index], weights, carrier, scale, last=last
    )
    return loss


EMPTY = TestPack(
    torch.zeros(1, dtype=torch.int64), torch.full((1,), IGNORE), torch.zeros(1, dtype=torch.int64), None, (1,)
)


def total_weight(packs: Sequence[TestPack]) -> float:
    """Sum of the target weights of a step."""
    return sum(
        float((p.targets != IGNORE).sum() if p.weights is None else p.weights[p.targets != IGNORE].double().sum())
        for p in packs
    )


def run_case(case: Case, groups: Groups) -> Result:
    """One SGD step without clipping, on every rank of the grid. Collective."""
    grid, rank = groups.grid, groups.rank
    if case.fault == "stale buffer":
        groups = Groups(grid, rank, StaleCommunicator(groups.communicator))
    spec = ModelSpec.of(tiny_llama(tie_word_embeddings=case.tied))
    trainee = trainee_on(grid, spec, shard=case.shard, activation_checkpointing=case.checkpointing)
    initial = {n: whole(p) for n, p in named_weights(trainee)}
    optimizer = build_optimizer(trainee, SGD)
    packs = make_step(case.packs, weighted=case.weighted, sparse=case.sparse)
    scale = 1.0 / total_weight(packs)
    if case.fault == "skipped pack":
        packs = packs[:-1]
    if case.fault == "gradient x 2":
        scale *= 2.0
    mine = packs[rank // grid.cp :: grid.dp]
    depth = -(-len(packs) // grid.dp)
    loss = 0.0
    for n, pack in enumerate(mine + [EMPTY] * (depth - len(mine))):
        last = n == depth - 1 or not case.once
        if case.fault == "ended too early":
            last = n == 0
        part = micro_batch_loss(trainee, pack, grid, groups, scale, layout=case.layout, last=last, fault=case.fault)
        part.backward()
        loss += part.item()
    norm = clip_by_global_norm(trainee, None)
    result = Result(sum_over_ranks(loss, None, CPU) if grid.world_size > 1 else loss, norm, initial)
    for name, parameter in named_weights(trainee):
        assert parameter.grad is not None
        result.gradient[name] = whole(parameter.grad)
    optimizer.step()
    for name, parameter in named_weights(trainee):
        result.update[name] = whole(parameter) - initial[name]
    return result


def run_cases(rank: int, world_size: int, cases: Sequence[Case]) -> list[Result] | None:
    """For `run_ranks`: the results, from rank 0."""
    groups = {g: build_groups(g) for g in dict.fromkeys(RankGrid(dp=c.dp, ring=c.cp) for c in cases)}
    assert dist.get_world_size() == world_size
    results = [run_case(c, groups[RankGrid(dp=c.dp, ring=c.cp)]) for c in cases]
    return results if rank == 0 else None


def plain_model(config: Any, seed: int = SEED) -> PreTrainedModel:
    """The same random weights in a plain Hugging Face model, fp64 (its eager attention would use an fp32 softmax)."""
    lm = empty_model(config, "sdpa")
    lm._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    lm.tie_weights()  # `_apply` copies a tied weight twice
    fill(lm, ModelSpec.of(config), config, seed)
    return lm.double()


def plain_loss(lm: PreTrainedModel, packs: Sequence[TestPack]) -> torch.Tensor:
    """Loss of a step, one document at a time."""
    terms = []
    for pack in packs:
        for start, end in zip((0, *pack.doc_ends), pack.doc_ends, strict=False):
            targets = pack.targets[start:end]
            logits = lm(
                input_ids=pack.ids[None, start:end], position_ids=pack.position_ids[None, start:end], use_cache=False
            ).logits[0]
            nll = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
            terms.append((nll if pack.weights is None else nll * pack.weights[start:end]).sum())
    return torch.stack(terms).sum() / total_weight(packs)


def run_reference(case: Case) -> Result:
    """The same step on one device."""
    lm = plain_model(tiny_llama(tie_word_embeddings=case.tied))
    initial = {n: p.detach().float().clone() for n, p in lm.named_parameters()}
    loss = plain_loss(lm, make_step(case.packs, weighted=case.weighted, sparse=case.sparse))
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in gradient.values()]).norm())
    return Result(loss.item(), norm, initial, gradient, {n: -SGD.lr * g for n, g in gradient.items()})


def difference(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest relative error of any tensor, norm(got - want) / norm(want)."""
    assert got.keys() == want.keys()
    return max(
        float((got[n].double() - want[n].double()).norm() / want[n].double().norm().clamp_min(1e-12)) for n in want
    )
