"""The Hugging Face seam: an attention implementation named "raycp", and the carrier that brings it its plan.

Guarantees: the plan arrives as the keyword argument `cp_plan` of the model call, in an object that is fresh per
micro-batch, never from a global; what raycp does not compute (a mask tensor, dropout, soft-capping, sinks, a window
that is not the plan's, an option it does not know) is refused by name; the `scaling` of the model is used as it is. The
name is registered with `AttentionInterface` only, not with the mask interface, so that transformers builds no mask
(seen on 5.24).

A model is built with `attn_implementation="raycp"` and called as
`model(ids, position_ids=..., use_cache=False, cp_plan=carrier)`.

Legend: t rows of the rank, H query heads, K key/value heads, D head dim, Dv value dim.
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from raycp.attention.agreement import check_agreement
from raycp.attention.api import make_call, run_call
from raycp.attention.call import AttentionStats, Tensors
from raycp.attention.groups import Groups
from raycp.attention.kernels import Kernel
from raycp.errors import ModelError, PlanError
from raycp.plan import AttentionPlan

ATTENTION_NAME = "raycp"

_NO_EFFECT = frozenset(
    {
        "cache_position",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Keyword arguments that reach attention functions and do not change what they compute."""


class Carrier:
    """What one micro-batch brings to the attention of every layer. Make a new one for each forward pass.

    It is not a dataclass: FSDP2 rebuilds every dataclass that it finds in a model's arguments, and a copy would lose
    what is kept here.

    Args:
        plan: of the pack; for a model whose layers differ, a plan by kind of layer, such as
            `{"full_attention": ..., "sliding_attention": ...}` (see `raycp.plan.plans_by_kind`).
        groups: of this rank.
        keep: hold what each layer's attention gave, so that activation checkpointing recomputes none of it and moves
            nothing again. Costs t x H x (Dv + 1) numbers a layer, and what is cached of K and V, until backward, or
            until the carrier goes: leave it off in evaluation. With Ulysses also q, k, v and output as they were
            exchanged: about t x (H x (D + Dv) + K x (D + Dv)) numbers more (K at least the Ulysses degree), where
            without them both exchanges would be repeated.
        on_layer: progress, called as `on_layer(layer, step)` after each step of each layer, forward and backward.
        kernel: None: what `kernel_for` has for the tensors' device.

    Attributes:
        kept: {layer: what `raycp.attention.function` keeps of its call, from the output [t, H, Dv] on}, emptied by
            recomputation.
        calls: {layer: number of attention calls, recomputations included}.
        stats: counts of kernel calls, blocks and bytes.

    Raises:
        PlanError: the plans do not hold the same tokens.
    """

    __slots__ = ("calls", "groups", "keep", "kept", "kernel", "on_layer", "plan", "stats")

    def __init__(
        self,
        plan: AttentionPlan | Mapping[str, AttentionPlan],
        groups: Groups,
        *,
        keep: bool = False,
        on_layer: Callable[[int, int], None] | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        if not isinstance(plan, AttentionPlan):
            _check_same_tokens(plan)
        self.plan = plan
        self.groups = groups
        self.keep = keep
        self.on_layer = on_layer
        self.kernel = kernel
        self.kept: dict[int, Tensors] = {}
        self.calls: dict[int, int] = {}
        self.stats = AttentionStats()

    def plan_of(self, layer: int, kind: str) -> AttentionPlan:
        """The plan of a layer.

        Raises:
            ModelError: no plan is for layers of this kind.
        """
        if isinstance(self.plan, AttentionPlan):
            return self.plan
        if kind not in self.plan:
            raise ModelError(
                f"layer {layer} is of kind {kind!r}, but there are plans for {sorted(self.plan)} only",
                fix="build the plans with plans_by_kind(windows, config.layer_types, ...)",
            )
        return self.plan[kind]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, kind: str = ""
    ) -> torch.Tensor:
        """Attention of one layer: q [t, H, D], k [t, K, D], v [t, K, Dv] -> [t, H, Dv].

        `kind` is that of the layer; it matters only if there are plans by kind.

        Raises:
            ModelError: a second forward pass with this carrier, or no plan for this kind of layer.
            PlanError: shapes do not fit the plan, or another rank has another plan.
        """
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing and layer in self.calls:
            raise ModelError(
                f"layer {layer} ran a second forward pass with one Carrier",
                fix="make a new Carrier for each forward pass; a model that shares one layer_idx between layers cannot "
                "be trained",
            )
        if not self.calls:
            plans = [self.plan] if isinstance(self.plan, AttentionPlan) else list(self.plan.values())
            check_agreement(plans, self.groups, q.device)
        self.calls[layer] = self.calls.get(layer, 0) + 1
        plan = self.plan_of(layer, kind)
        call = make_call(q, k, v, plan=plan, groups=self.groups, scale=scale, kernel=self.kernel)
        on_layer = self.on_layer
        call = dataclasses.replace(
            call,
            name=f"layer {layer}",
            stats=self.stats,
            on_step=None if on_layer is None else lambda step: on_layer(layer, step),
            recall=(lambda: self.kept.pop(layer, None)) if recomputing else None,
            keep=(lambda tensors: self.kept.__setitem__(layer, tensors)) if self.keep and not recomputing else None,
        )
        return run_call(q, k, v, plan=plan, groups=self.groups, call=call)


def register_attention() -> str:
    """Makes `attn_implementation="raycp"` known to transformers, in this process; again has no effect.

    Returns:
        The name, `ATTENTION_NAME`.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)
    return ATTENTION_NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cp_plan: Carrier | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls.

    Args:
        module: the attention layer; its `layer_idx` names it.
        query: [1, H, t, D].
        key: [1, K, t, D].
        value: [1, K, t, Dv].
        attention_mask: must be None.
        scaling: factor of the scores; None: D ** -0.5.
        dropout: must be 0.
        cp_plan: the carrier.
        options: anything else that the model passes; refused where it would change the result.

    Returns:
        out [1, t, H, Dv], and None for the attention weights.

    Raises:
        ModelError: something that raycp does not compute was asked for.
    """
    if not isinstance(cp_plan, Carrier):
        raise ModelError(
            f"attention {ATTENTION_NAME!r} got cp_plan={type(cp_plan).__name__}: it needs the plan of the pack",
            fix="call model(ids, position_ids=..., use_cache=False, cp_plan=Carrier(plan, groups)); if you did, this "
            "model type does not hand keyword arguments on to its attention",
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelError(f"{type(module).__name__} has no layer_idx", fix="use a model of the supported families")
    if attention_mask is not None:
        raise ModelError(
            f"layer {layer} got a mask tensor of shape {list(attention_mask.shape)}: the mask is the plan's",
            fix="do not pass attention_mask to the model, and pass use_cache=False",
        )
    if dropout > 0:
        raise ModelError(
            f"layer {layer} asks for dropout={dropout}", fix="set attention_dropout=0 in the model's config"
        )
    if query.shape[0] != 1:
        raise ModelError(
            f"layer {layer} got a batch of {query.shape[0]} rows", fix="pack documents into one row of shape [1, t]"
        )
    kind = _kind(layer, module, options)
    _check_options(layer, module, cp_plan.plan_of(layer, kind), options)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cp_plan.attend(layer, q, k, v, scale, kind=kind)[None], None


def _kind(layer: int, module: torch.nn.Module, options: Mapping[str, object]) -> str:
    """The kind of a layer, as the model names it; by its sliding window if the model names none."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if kinds is not None and layer < len(kinds):
        return str(kinds[layer])
    return "full_attention" if options.get("sliding_window") is None else "sliding_attention"


def _check_same_tokens(plans: Mapping[str, AttentionPlan]) -> None:
    first = next(iter(plans.values()), None)
    if first is None or not all(first.holds_same_tokens(plan) for plan in plans.values()):
        raise PlanError(
            f"the plans for layers of kinds {sorted(plans)} do not split the pack in the same way",
            fix="build them together, with raycp.plan.plans_by_kind",
        )


def _check_options(layer: int, module: torch.nn.Module, plan: AttentionPlan, options: dict[str, object]) -> None:
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", None) if causal is None else causal
    if causal is not None and bool(causal) != (plan.mask == "causal"):
        raise ModelError(
            f"layer {layer} has is_causal={causal}, the plan has mask={plan.mask!r}",
            fix=f"build the plan with mask={'causal' if causal else 'full'!r}",
        )
    for name, value in options.items():
        if value is None or name in _NO_EFFECT or name in ("is_causal", "sliding_window"):
            continue
        if name == "output_attentions" and not value:
            continue
        raise ModelError(
            f"layer {layer} passes {name}={_describe(value)} to its attention, which raycp does not compute",
            fix=f"use a model or config without {name}",
        )
    window = options.get("sliding_window")
    if isinstance(window, int) and window >= plan.longest_document:
        window = None
    if window != plan.sliding_window:
        raise ModelError(
            f"layer {layer} passes sliding_window={window}, the plan has sliding_window={plan.sliding_window} "
            f"(longest document: {plan.longest_document} tokens)",
            fix=f"build the plan with sliding_window={window}, or use documents no longer than the window",
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
