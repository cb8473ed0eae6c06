"""The sharded model with its loss: what one rank trains.

t tokens of this rank (may be 0), h hidden size, V vocabulary. Guarantees: the same data gives the same loss and
gradients for every (dp, cp, accumulation), since every reduction is a sum and the scale is counted once; parameters
are fp32 masters, sharded by FSDP2 over dp x cp (or replicated); a tied weight is one parameter, gathered once per
micro-batch together with norm and head. Ranks without tokens or targets take part in every collective.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from raycp.attention import ATTENTION_NAME, Carrier, register_attention
from raycp.errors import ModelError
from raycp.training.collectives import P2PAllGather, PairwiseReduceScatter
from raycp.training.device import compute_dtype
from raycp.training.layers import AttentionLayers
from raycp.training.loss import IGNORE, chunked_cross_entropy
from raycp.training.mesh import replicated
from raycp.training.replicas import Replicas
from raycp.training.sharding import held_rows
from raycp.training.spec import ModelSpec
from raycp.training.weights import empty_model, fill


class Trainee(nn.Module):
    """A causal language model and its chunked loss, as one FSDP2 root.

    Attributes:
        lm: the Hugging Face model.
        activation_checkpointing: layers are computed again in backward; the carrier should keep attention's output.
        replicas: whose parameters these are, with `shard="none"`.
    """

    replicas: Replicas | None

    def __init__(self, lm: PreTrainedModel, *, loss_chunk: int, activation_checkpointing: bool) -> None:
        super().__init__()
        self.lm = lm
        self.replicas = None
        self.loss_chunk = loss_chunk
        self.activation_checkpointing = activation_checkpointing
        self._logit_scale = 1.0 / float(getattr(lm.config, "logits_scaling", 1.0))
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            raise ModelError(f"{lm.config.model_type}: a head with a bias is not supported", fix="use another model")
        if activation_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    @property
    def layers(self) -> AttentionLayers:
        """What attention plans need to know of the model."""
        return AttentionLayers.of(self.lm.config)

    @property
    def config(self) -> PretrainedConfig:
        return self.lm.config

    def rest(self) -> None:
        """Parameters are those that the optimizer holds, until the next forward."""
        if self.replicas is not None:
            self.replicas.rest()
        elif isinstance(self, FSDPModule):
            self.reshard()

    def forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        targets: torch.Tensor,
        weights: torch.Tensor | None,
        carrier: Carrier,
        scale: float,
        *,
        last: bool = True,
    ) -> torch.Tensor:
        """Loss of this rank's share of one micro-batch.

        Args:
            ids: int64 [t].
            position_ids: int64 [t], position inside the document.
            targets: int64 [t], already shifted; -100 is no target.
            weights: fp32 [t] or None.
            carrier: the attention plan of this pack, fresh per micro-batch.
            scale: 1 / sum of the target weights of the whole step.
            last: no other micro-batch of the step follows. With `shard="none"`, gradients are summed over ranks, and
                are there for the optimizer, only after the backward pass of such a one.

        Returns:
            fp32 scalar; the loss of the step is its sum over ranks and micro-batches. Gradients are summed over ranks
            in its backward pass, so `backward()` on it is all there is to do.

        Raises:
            ModelError: a layer did not use the attention plan.
        """
        if self.replicas is not None:
            self.replicas.last = last
        plan: Carrier = carrier
        if not ids.numel():
            plan, ids, position_ids = _EmptyShard(carrier), ids.new_zeros(1), position_ids.new_zeros(1)
        hidden = self.lm.base_model(
            input_ids=ids[None], position_ids=position_ids[None], use_cache=False, cp_plan=plan
        ).last_hidden_state[0]  # [t, h]
        layers = int(self.lm.config.num_hidden_layers)
        if len(carrier.calls) != layers:
            raise ModelError(
                f"{self.lm.config.model_type}: {len(carrier.calls)} of {layers} layers used the attention plan, so "
                "documents of a pack would see each other",
                fix="use a supported model type, and build it with attn_implementation='raycp'",
            )
        rows = torch.nonzero(targets != IGNORE).flatten()
        return chunked_cross_entropy(
            hidden.index_select(0, rows),
            cast(torch.Tensor, self.lm.get_output_embeddings().weight),
            targets.index_select(0, rows),
            None if weights is None else weights.index_select(0, rows),
            chunk=self.loss_chunk,
            scale=scale,
            logit_scale=self._logit_scale,
        )


class _EmptyShard(Carrier):
    """Attention of a rank that holds no token.

    Models do not run on 0 rows (`view(1, 0, -1, head_dim)` is ambiguous). One row without a target goes through the
    layers, attention leaves it out, and all its gradients are exactly 0.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Carrier) -> None:
        super().__init__(inner.plan, inner.groups)
        self._inner = inner

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, kind: str = ""
    ) -> torch.Tensor:
        out = self._inner.attend(layer, q[:0], k[:0], v[:0], scale, kind=kind)
        return torch.cat((out, q.new_zeros(1, q.shape[1], v.shape[2])))


def build_trainee(
    spec: ModelSpec,
    *,
    mesh: DeviceMesh,
    shard: str,
    dtype: str,
    device: torch.device,
    activation_checkpointing: bool,
    loss_chunk: int,
    seed: int,
    initialise: bool = True,
    on_piece: Callable[[], None] = lambda: None,
) -> Trainee:
    """Makes the model on the meta device, shards it, and fills the own rows. Collective over `mesh`.

    Args:
        spec: where the model comes from.
        mesh: 1-D mesh over all ranks, of this generation (`build_mesh`).
        shard: "full": parameters, gradients and optimizer sharded over the mesh; "none": replicated.
        dtype: compute dtype: "float32", or "bfloat16" (parameters and optimizer stay fp32, gradients reduce in fp32).
        device: of this rank.
        activation_checkpointing: recompute each layer in backward.
        loss_chunk: target rows that go through the head at once.
        seed: of random initialisation.
        initialise: False when `import_state` follows: parameters are NaN and no weight file is read.
        on_piece: called whenever a part of the work is done, such as a tensor that was read or made.

    Raises:
        ModelError: the weights do not fit the configuration.
    """
    register_attention()
    config = spec.load_config()
    lm = empty_model(config, ATTENTION_NAME)
    on_piece()
    trainee = Trainee(lm, loss_chunk=loss_chunk, activation_checkpointing=activation_checkpointing)
    if shard == "none":
        trainee.replicas = _replicate(trainee, mesh, device, compute_dtype(dtype))
    else:
        _shard(trainee, mesh, device, dtype)
    on_piece()
    # Only meta tensors (parameters) are allocated: `to_empty` would turn the rotary tables into garbage.
    trainee._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))  # type: ignore[no-untyped-call]
    on_piece()
    if initialise:
        fill(trainee, spec, config, seed, on_piece=on_piece)
    else:
        for parameter in trainee.parameters():
            held_rows(parameter)[0].fill_(float("nan"))
    return trainee.train()


def _replicate(trainee: Trainee, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> Replicas:
    """Gradients become complete from the head down to the embedding, which may be one parameter with the head."""
    lm = trainee.lm
    layers, embedding = list(lm.base_model.layers), set(lm.get_input_embeddings().parameters())
    inside = {p for layer in layers for p in layer.parameters()}
    above = [p for p in trainee.parameters() if p not in inside and p not in embedding]
    parts = [above, *(list(layer.parameters()) for layer in reversed(layers))]
    return Replicas(trainee, replicated(mesh), device=device, dtype=dtype, parts=parts)


def _shard(trainee: Trainee, mesh: DeviceMesh, device: torch.device, dtype: str) -> None:
    """FSDP2: each layer a group, and the rest (embedding, norm and head, which may share a weight) another."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype(dtype) != torch.float32:
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype(dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    layers = [fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in trainee.lm.base_model.layers]
    root = fully_shard(trainee, mesh=mesh, mp_policy=policy)
    if device.type == "cpu":  # elsewhere streams overlap; in backward FSDP2 gathers the next layer ahead by itself
        for module, following in pairwise((root, *layers)):
            module.set_modules_to_forward_prefetch([following])
    for module in trainee.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if device.type == "cpu":
                module.set_custom_all_gather(P2PAllGather())
                module.set_custom_reduce_scatter(PairwiseReduceScatter())
