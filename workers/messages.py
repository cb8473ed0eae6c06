"""The values that travel between the driver and a worker. Frozen, picklable, small.

Guarantees: every request carries the generation it belongs to, so that a message of an older world is refused by
`TrainWorker` and a late answer is recognised by the driver; no tensor, path of the driver's machine or live handle
travels (`RunSpec.output_dir` and the stores are folders that start-up proved to be shared).
"""

from dataclasses import dataclass, field
from typing import Any

from raycp.config import FitConfig
from raycp.plan import CostModel, RankGrid
from raycp.training.device import DeviceSpec
from raycp.training.spec import ModelSpec
from workers.wire import KeeperAddress

COLLECTIVE_TIMEOUT = 1800.0
"""Seconds that one collective may wait: longer than the longest imbalance of a step. Faults are seen much earlier."""


@dataclass(frozen=True, kw_only=True)
class StoreSpec:
    """A document store on shared storage and the pack plan that both sides derive from it."""

    folder: str
    fingerprint: str
    packing: str
    plan_hash: str
    """Hash of the plan of epoch 0: a worker that derives another one must not train."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What does not change while a run lives, whatever happens to its workers."""

    run_id: str
    output_dir: str
    model: ModelSpec
    model_fingerprint: str
    """The driver's view of the model; a node that sees another one must not train."""
    tokenizer_folder: str
    """Under `output_dir`: a copy of the tokenizer that the data was rendered with."""
    device: DeviceSpec
    dtype: str
    """Compute dtype, resolved: "float32" or "bfloat16"."""
    config: FitConfig
    total_steps: int
    cost: CostModel
    """Figures of the device and the model; those of a placement are in `Rendezvous`."""
    train: StoreSpec
    evaluation: StoreSpec | None


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where and as whom a worker joins the groups of one generation."""

    generation: int
    rank: int
    grid: RankGrid
    store_host: str
    store_port: int
    timeout: float
    """Seconds that one collective may wait."""
    threads: int
    """Compute threads of this rank (CPU)."""
    cost: CostModel = field(default_factory=CostModel)
    """Figures that layouts and algorithms of packs are chosen by: the same on every rank."""
    keeper: KeeperAddress | None = None
    """This node's keeper, which snapshots go to; None: state is saved on storage only."""
    secret: bytes = field(default=b"", repr=False)
    """Of the run: keepers talk to nobody else."""


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """One optimizer step: the whole input beside the training state."""

    generation: int
    step: int
    pack_ids: tuple[int, ...]
    next_pack_ids: tuple[int, ...] = ()
    """Of the step after this one: planned ahead."""
    snapshot: bool = False
    """Copy the state to the keeper after this step."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rank did in a step.

    `loss_sum` is this rank's sum of weight x cross-entropy, fp64; the driver adds the ranks in rank order and divides
    by `weight`, the step's global sum of target weights (the same on every rank).
    """

    generation: int
    step: int
    rank: int
    loss_sum: float
    weight: float
    grad_norm: float
    lr: float
    tokens: int
    """Tokens of the step over all ranks, padding included."""
    targets: int
    seconds: float
    remote_blocks_held: int
    """Most remote K/V blocks that this rank held at once."""
    stall_seconds: float = 0.0
    """Time that this step waited for the copy of the state of the step before."""
    data_seconds: float = 0.0
    """Time that this step waited for its packs and their attention plans."""
    copy_problem: str = ""
    """Why this rank's last copy was not made, and none will be until it is attached to a keeper again."""


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """One rank's part of an evaluation; sums as in `StepReport`."""

    generation: int
    rank: int
    loss_sum: float
    weight: float
    targets: int


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a worker process found out about itself before it joins anything."""

    node_id: str
    address: str
    pid: int
    accelerators: tuple[str, ...]
    cpu_count: int
    started: float = 0.0
    """When the process was started (seconds since the epoch): with the pid, its identity on the node."""
    memory: int = 0
    """Bytes of memory for all ranks of this node (CPU), or of this rank's accelerator."""
    host_memory: int = 0
    """Bytes of memory of this node that nobody uses yet."""
    problems: tuple[tuple[str, str], ...] = ()
    """(message, fix) of everything that is wrong on this node."""
    unfit: bool = False
    """One of the problems is this process' device, not the node."""
    sku: str = ""
    """What the device calls itself; "cpu" for a CPU."""
    facts: dict[str, Any] = field(default_factory=dict)
