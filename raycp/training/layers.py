"""What a model's attention layers look like, and the attention plan of a pack for them.

Guarantees: every rank builds the same plans from the same pack; layers of one kind share a plan; the plans of several
kinds (full and sliding attention) split the pack in one way, so hidden states stay where they are between layers.
Imports neither torch nor transformers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycp.plan import AttentionPlan, RankGrid, plans_by_kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """Head counts, and the kind of each layer with its sliding window (tokens seen, the own included; None: all)."""

    num_heads: int
    num_kv_heads: int
    kinds: tuple[str, ...]
    windows: Mapping[str, int | None]

    @classmethod
    def of(cls, config: "PretrainedConfig") -> "AttentionLayers":
        """From a transformers configuration."""
        query = int(config.num_attention_heads)
        window = getattr(config, "sliding_window", None)
        named = getattr(config, "layer_types", None)
        kinds = tuple(named) if named else (FULL if window is None else SLIDING,) * int(config.num_hidden_layers)
        return cls(
            num_heads=query,
            num_kv_heads=int(getattr(config, "num_key_value_heads", None) or query),
            kinds=kinds,
            windows={kind: window if kind == SLIDING else None for kind in dict.fromkeys(kinds)},
        )

    @property
    def counted(self) -> tuple[tuple[int | None, int], ...]:
        """(sliding window, layers) of each kind."""
        return tuple((window, self.kinds.count(kind)) for kind, window in self.windows.items())

    def plan(self, doc_ends: Sequence[int], grid: RankGrid, **options: Any) -> AttentionPlan | dict[str, AttentionPlan]:
        """What a `Carrier` takes for one pack: its plan, or a plan for each kind of layer.

        Args:
            doc_ends: where each document ends.
            grid: the world.
            options: further arguments of `AttentionPlan.build`.
        """
        options |= {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        if len(self.windows) > 1:
            return plans_by_kind(self.windows, self.kinds, doc_ends, grid, **options)
        (window,) = self.windows.values()
        return AttentionPlan.build(doc_ends, grid, sliding_window=window, **options)


def split_of(plan: AttentionPlan | Mapping[str, AttentionPlan]) -> AttentionPlan:
    """A plan that says which tokens each rank holds: plans by kind all hold the same."""
    return plan if isinstance(plan, AttentionPlan) else next(iter(plan.values()))
