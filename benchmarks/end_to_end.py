"""Shows training steps of a tiny Llama on two CPU processes, against DeepSpeed Ulysses on the same weights and tokens.

15.5M parameters (hidden 512, 4 layers, 8 query heads, 2 key/value heads, vocabulary 4 096), fp32, SGD, one document of
S tokens: raycp with `shard="none"` beside ZeRO-0, `shard="full"` beside ZeRO-3, and plain transformers on one process
with two threads. Every way runs in fresh processes, in turn, several times; tokens per second are of the median and of
the fastest step after the first, processor time is the least of a step, summed over ranks; peak memory is the resident
set of the fuller rank, whole and above what imports took. The first step's
loss must agree. DeepSpeed is left out where it is not installed.
"""

import importlib
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Report, parser, table
from raycp.attention import Carrier, build_groups
from raycp.config import OptimConfig
from raycp.plan import AttentionPlan, CostModel, choose_grid
from raycp.training.mesh import build_mesh
from raycp.training.model import build_trainee
from raycp.training.optim import build_optimizer
from raycp.training.spec import ModelSpec
from tests.multiproc.launcher import run_ranks

RANKS = 2
VOCABULARY = 4096
LEARNING_RATE = 1e-3
LOSS_CHUNK = 1024
OURS_WHOLE, OURS_SHARDED = "raycp, shard=none", "raycp, shard=full"
ZERO_0, ZERO_3 = "DeepSpeed Ulysses, ZeRO-0", "DeepSpeed Ulysses, ZeRO-3"
ALONE = "transformers, 1 process, 2 threads"


@dataclass(frozen=True)
class Run:
    """What a rank saw in a run: seconds of each step, its processor seconds, losses, peak bytes, above the imports."""

    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    losses: tuple[float, ...]
    peak: int
    above_imports: int


@dataclass(frozen=True)
class Job:
    """What to run; `folder` holds the weights."""

    way: str
    folder: str
    num_tokens: int
    steps: int


Step = Callable[[], float]
"""One optimizer step; returns this rank's loss."""


def save_model(folder: Path, *, small: bool) -> None:
    """Random weights, written once, read by every way."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64 if small else 512,
        intermediate_size=160 if small else 1408,
        num_hidden_layers=2 if small else 4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=65_536,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def data(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and shifted targets of one document, int64 [T]; the last target is none."""
    ids = torch.randint(VOCABULARY, (num_tokens,), generator=torch.Generator().manual_seed(1))
    return ids, torch.cat((ids[1:], torch.tensor([-100])))


def ours(job: Job, rank: int) -> Step:
    """Collective: raycp, with algorithm, grid and layout chosen."""
    spec = ModelSpec.of(job.folder)
    config = spec.load_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads
    cost = CostModel(head_dim=width, value_dim=width)
    grid = choose_grid(RANKS, heads, kv_heads, job.num_tokens, cost).grid
    groups = build_groups(grid)
    plan = AttentionPlan.build([job.num_tokens], grid, num_heads=heads, num_kv_heads=kv_heads, cost=cost)
    trainee = build_trainee(
        spec,
        mesh=build_mesh(RANKS, "cpu"),
        shard="none" if job.way == OURS_WHOLE else "full",
        dtype="float32",
        device=torch.device("cpu"),
        activation_checkpointing=False,
        loss_chunk=LOSS_CHUNK,
        seed=0,
    )
    optimizer = build_optimizer(trainee, OptimConfig(name="sgd", lr=LEARNING_RATE, clip=None))
    index = torch.from_numpy(plan.token_index(groups.cp_rank))
    ids, targets = (x[index] for x in data(job.num_tokens))
    if rank == 0:
        print(f"{job.way}, {job.num_tokens} tokens: {plan.algorithm}, {plan.layout}, {grid}", flush=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = trainee(ids, index, targets, None, Carrier(plan, groups), 1 / (job.num_tokens - 1))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def deepspeed(job: Job, rank: int) -> Step:
    """Collective: DeepSpeed's recipe for Ulysses with a Hugging Face model; contiguous slices, its own loss."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import torch.distributed.nn.functional as differentiable
    from transformers import AutoModelForCausalLM

    ds = importlib.import_module("deepspeed")
    ulysses = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    ds.comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = AutoModelForCausalLM.from_pretrained(job.folder, attn_implementation="sdpa", dtype=torch.float32)
    mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=RANKS,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    engine, *_ = ds.initialize(
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0 if job.way == ZERO_0 else 3},
            "sequence_parallel_size": RANKS,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 1e9,
        },
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        mpu=mpu,
    )
    each = job.num_tokens // RANKS
    index = torch.arange(rank * each, (rank + 1) * each)
    ids, targets = (x[index][None] for x in data(job.num_tokens))
    share = (targets != -100).sum() / (job.num_tokens - 1)

    def step() -> float:
        logits = engine(input_ids=ids, position_ids=index[None], use_cache=False).logits
        loss = engine.module.loss_function(
            logits=logits, labels=None, shift_labels=targets, vocab_size=engine.module.config.vocab_size
        )
        whole = sum(differentiable.all_gather(loss * share))  # type: ignore[no-untyped-call]
        engine.backward(whole)
        engine.step()
        return float((loss * share).detach())

    return step


def alone(job: Job, rank: int) -> Step:
    """Plain transformers on rank 0, with two threads; the other rank waits."""
    if rank:
        return lambda: 0.0
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(job.folder, attn_implementation="sdpa", dtype=torch.float32).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    ids, targets = data(job.num_tokens)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids[None], labels=ids[None], shift_labels=targets[None], use_cache=False).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


WAYS: dict[str, Callable[[Job, int], Step]] = {
    OURS_WHOLE: ours,
    ZERO_0: deepspeed,
    OURS_SHARDED: ours,
    ZERO_3: deepspeed,
    ALONE: alone,
}


def rank_main(rank: int, world: int, job: Job) -> Run:
    """Runs the steps of a job."""
    if WAYS[job.way] is deepspeed:
        os.environ["DS_ACCELERATOR"] = "cpu"
        importlib.import_module("deepspeed")
    before = _status("VmRSS")
    step = WAYS[job.way](job, rank)
    seconds, cpu, losses = [], [], []
    for _ in range(job.steps):
        dist.barrier()
        began, spent = time.perf_counter(), time.process_time()
        losses.append(step())
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - spent)
    peak = _status("VmHWM")
    return Run(tuple(seconds), tuple(cpu), tuple(losses), peak, peak - before)


def _status(field: str) -> int:
    """Bytes of a field of this process's status (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(folder: str, num_tokens: int, *, steps: int, rounds: int) -> dict[str, list[list[Run]]]:
    """Every way, in turn: for each, its runs; for each, its ranks."""
    found: dict[str, list[list[Run]]] = {}
    installed = importlib.util.find_spec("deepspeed") is not None
    for _ in range(rounds):
        for way, fn in WAYS.items():
            if fn is deepspeed and not installed:
                continue
            runs = run_ranks(rank_main, RANKS, Job(way, folder, num_tokens, steps), timeout=600)
            found.setdefault(way, []).append(runs)
    return found


def judge(report: Report, num_tokens: int, found: dict[str, list[list[Run]]]) -> None:
    """Table and bars of one length."""
    speed, fastest, cpu, memory, rows = {}, {}, {}, {}, []
    for way, runs in found.items():
        taken = [s for ranks in runs for s in ranks[0].seconds[1:]]
        speed[way], fastest[way] = num_tokens / median(taken), num_tokens / min(taken)
        cpu[way] = min(sum(r.cpu[n] for r in ranks) for ranks in runs for n in range(1, len(ranks[0].cpu)))
        memory[way] = max(r.peak for ranks in runs for r in ranks)
        above = max(r.above_imports for ranks in runs for r in ranks)
        loss = sum(r.losses[0] for r in runs[0])
        timed = (median(taken), min(taken), cpu[way], speed[way], fastest[way])
        rows.append((way, *timed, memory[way] / 2**20, above / 2**20, f"{loss:.5f}"))
    print(f"\none document of {num_tokens} tokens")
    times = ("s / step, median", "least", "processor", "tokens / s, median", "most")
    table(("way", *times, "peak MiB / rank", "above imports", "first loss"), rows)
    losses: list[Any] = [float(row[-1]) for row in rows]
    report.at_most("first losses differ by", max(losses) - min(losses), 2e-4)
    for mine, peer in ((OURS_WHOLE, ZERO_0), (OURS_SHARDED, ZERO_3), (OURS_WHOLE, ALONE)):
        if peer not in speed:
            print(f"{peer}: not installed")
            continue
        bar = None if peer == ALONE else 1.0
        report.at_least(f"tokens / s of {mine} over {peer}, median", speed[mine] / speed[peer], bar, "x")
        report.at_least(f"tokens / s of {mine} over {peer}, most", fastest[mine] / fastest[peer], bar, "x")
        report.at_most(f"processor time of {mine} over {peer}", cpu[mine] / cpu[peer], None, "x")
        report.at_most(f"peak memory of {mine} over {peer}", memory[mine] / memory[peer], bar, "x")


def main() -> int:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="runs of every way")
    options.add_argument("--steps", type=int, default=4, help="steps of a run; the first warms up")
    options.add_argument("--tokens", type=int, nargs="+", default=(2048, 8192), help="lengths of the document")
    chosen = options.parse_args()
    report = Report()
    report.header("end_to_end")
    sizes, rounds, steps = ((256,), 1, 2) if chosen.quick else (chosen.tokens, chosen.rounds, chosen.steps)
    with tempfile.TemporaryDirectory(prefix="raycp-bench-") as folder:
        save_model(Path(folder), small=chosen.quick)
        for num_tokens in sizes:
            judge(report, num_tokens, measure(folder, num_tokens, steps=steps, rounds=rounds))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
