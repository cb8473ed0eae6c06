"""Which packs a step takes, where a run stands, and which replica takes which pack.

Guarantees: everything here is a pure function of the plan and the global batch; the number of workers enters only in
`assign_packs`, which splits the packs of one step and never chooses them. So a run that loses or gains workers goes on
with the same packs in the same order, and resuming costs a division, not a replay. A cursor of another plan is refused.
Cost: O(1) per step. No numpy arrays are held.

Words: a pack id is `epoch * packs_per_epoch + index`; steps count from 1.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from data_pipeline.packing import epoch_hash
from raycp.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Position of a run: the next pack to take is number `pack_index` of `epoch`, in the plan `plan_hash`."""

    epoch: int
    pack_index: int
    plan_hash: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Cursor":
        """Reverse of `to_dict`.

        Raises:
            CheckpointError: a field is missing or of the wrong type.
        """
        try:
            return cls(epoch=int(raw["epoch"]), pack_index=int(raw["pack_index"]), plan_hash=str(raw["plan_hash"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"data cursor {raw!r} cannot be read: {error!r}", fix="resume from another checkpoint"
            ) from error


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Steps of a run.

    Args:
        num_packs: packs of an epoch (the same in every epoch).
        global_batch: packs of a step; the last step of an epoch takes what is left, a step never crosses an epoch.
        epochs: passes over the data, may be fractional: its steps are rounded up.
        steps: total steps instead; below or above what `epochs` gives, then over further epochs.
        family: `PackPlan.family` of the run's plans.

    Raises:
        ConfigError: a count below 1.
    """

    num_packs: int
    global_batch: int
    epochs: float = 1.0
    steps: int | None = None
    family: str = ""

    def __post_init__(self) -> None:
        for name, value in (("num_packs", self.num_packs), ("global_batch", self.global_batch), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is below 1", fix=f"set {name} to 1 or more")
        if not (math.isfinite(self.epochs) and self.epochs > 0):
            raise ConfigError(f"epochs={self.epochs} is not above 0", fix="set epochs to a number above 0")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one whole epoch."""
        return -(-self.num_packs // self.global_batch)

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(round(self.epochs * self.steps_per_epoch, 6)))

    @property
    def num_epochs(self) -> int:
        """Epochs that the run touches."""
        return -(-self.total_steps // self.steps_per_epoch)

    def pack_ids(self, step: int) -> tuple[int, ...]:
        """Global pack ids of a step, 1 <= step <= total_steps, in order.

        Raises:
            ConfigError: a step outside the run.
        """
        if not 1 <= step <= self.total_steps:
            raise ConfigError(f"step {step} of a run of {self.total_steps} steps", fix=f"use 1 to {self.total_steps}")
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        first = index * self.global_batch
        last = min(first + self.global_batch, self.num_packs)
        return tuple(range(epoch * self.num_packs + first, epoch * self.num_packs + last))

    def locate(self, pack_id: int) -> tuple[int, int]:
        """(epoch, index in the epoch's plan) of a global pack id."""
        return divmod(pack_id, self.num_packs)

    def cursor(self, step: int) -> Cursor:
        """Position after `step` steps; 0 is the start."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return Cursor(epoch=epoch, pack_index=index * self.global_batch, plan_hash=epoch_hash(self.family, epoch))

    def restore(self, cursor: Cursor) -> int:
        """Steps done at `cursor`: the next one to run is that plus 1.

        Raises:
            CheckpointError: the cursor belongs to another plan, or is not between two steps of this schedule.
        """
        want = epoch_hash(self.family, cursor.epoch)
        if cursor.plan_hash != want:
            raise CheckpointError(
                f"the checkpoint's data cursor belongs to pack plan {cursor.plan_hash}, this run's plan of epoch "
                f"{cursor.epoch} is {want}: data, tokenizer, seq_length, packing or seed differ",
                fix="restore what changed, or start a new output_dir",
                found=cursor.plan_hash,
                expected=want,
            )
        index, rest = divmod(cursor.pack_index, self.global_batch)
        if rest or not 0 <= index < self.steps_per_epoch:
            raise CheckpointError(
                f"the checkpoint stopped at pack {cursor.pack_index} of {self.num_packs}, which is not between two "
                f"steps of global_batch={self.global_batch}",
                fix="set global_batch to what it was when the checkpoint was written",
                found=cursor.pack_index,
                expected=f"a multiple of {self.global_batch} below {self.num_packs}",
            )
        return cursor.epoch * self.steps_per_epoch + index


def attention_cost(doc_lengths: Sequence[int]) -> float:
    """Attention work of a pack: the sum of squared document lengths."""
    return float(sum(n * n for n in doc_lengths))


def assign_packs(costs: Sequence[float], dp: int) -> list[list[int]]:
    """Spreads the packs of a step over data-parallel replicas by work.

    Longest processing time first, with at most ceil(n / dp) packs per replica so that the number of micro-batches is
    no larger than it has to be. Ties go to the lower index, so every process computes the same.

    Args:
        costs: [n] work of each pack, for instance `attention_cost`.
        dp: replicas.

    Returns:
        dp lists of indices into `costs`, each ascending; together each index once. Some are shorter, or empty, where
        dp does not divide n.

    Raises:
        ConfigError: dp below 1.
    """
    if dp < 1:
        raise ConfigError(f"dp={dp} is below 1", fix="set parallel.dp to 1 or more")
    most = -(-len(costs) // dp)
    loads: list[float] = [0.0] * dp
    chosen: list[list[int]] = [[] for _ in range(dp)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        replica = min((r for r in range(dp) if len(chosen[r]) < most), key=lambda r: (loads[r], r))
        chosen[replica].append(index)
        loads[replica] += costs[index]
    return [sorted(indices) for indices in chosen]
