"""Document and Pack: the value objects that everything after rendering works on.

Guarantees: targets are shifted here, once, inside the document, so that no later split can lose or leak one: the last
position of every document is IGNORE, hence no document predicts its successor. Boundaries come from lengths, never from
a token id, so pad id == eos id is harmless. A pack is as long as its documents: padding happens only on demand, as
1-token documents without a target, which see themselves only and so cost no attention.
Cost: one copy of the tokens per pack. numpy only.

Legend: n tokens of a document, T tokens of a pack.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raycp.errors import DataError

IGNORE = -100
"""Target of a position that is not trained."""
PAD_ID = 0
"""Token id of pad rows. Never looked at: a pad row is a document of its own, without a target."""

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False, kw_only=True)
class Document:
    """One document: its tokens see only each other.

    Args:
        ids: [n] int32 token ids, n >= 1.
        targets: [n] int32, already shifted: `targets[i]` is `ids[i + 1]` where that token is trained, else IGNORE;
            the last is IGNORE.
        weights: [n] float32 loss weight of each target, or None for 1 everywhere.
        start_position: position id of the first token; above 0 for a later fragment that keeps running positions.
        row_id: where it came from.

    Raises:
        DataError: fields of unequal length, no token, or a last target that is not IGNORE.
    """

    ids: Int32
    targets: Int32
    weights: Float32 | None = None
    start_position: int = 0
    row_id: str = ""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "ids", np.asarray(self.ids, dtype=np.int32))
        set_(self, "targets", np.asarray(self.targets, dtype=np.int32))
        if self.weights is not None:
            set_(self, "weights", np.asarray(self.weights, dtype=np.float32))
        where = f"document {self.row_id or '(no row id)'}"
        fix = "build documents with data_pipeline.document.shift_targets"
        if self.ids.ndim != 1 or self.ids.size == 0:
            raise DataError(f"{where} has ids of shape {self.ids.shape}, want [n] with n >= 1", fix=fix)
        for name, field in (("targets", self.targets), ("weights", self.weights)):
            if field is not None and field.shape != self.ids.shape:
                raise DataError(f"{where}: {name} {field.shape} and ids {self.ids.shape} differ in shape", fix=fix)
        if self.targets[-1] != IGNORE:
            raise DataError(f"{where}: its last target is {self.targets[-1]}, which is of the next document", fix=fix)
        if self.start_position < 0:
            raise DataError(f"{where}: start_position={self.start_position} is negative", fix="start at 0 or later")

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def num_targets(self) -> int:
        """Positions that are trained."""
        return int(np.count_nonzero(self.targets != IGNORE))

    @property
    def target_weight(self) -> float:
        """Sum of the weights of the targets: this document's share of the loss denominator."""
        return target_weight(self.targets, self.weights)


@dataclass(frozen=True, eq=False, kw_only=True)
class Pack:
    """One row of documents, of T tokens.

    Args:
        ids: [T] int32.
        targets: [T] int32, shifted, IGNORE where not trained.
        weights: [T] float32, or None for 1 everywhere.
        position_ids: [T] int32, counting up from `start_position` in each document.
        doc_ends: end of each document as host ints, ascending; the last is T.
        row_ids: one per document; "" for a pad row.
    """

    ids: Int32
    targets: Int32
    weights: Float32 | None
    position_ids: Int32
    doc_ends: tuple[int, ...]
    row_ids: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def num_targets(self) -> int:
        """Positions that are trained."""
        return int(np.count_nonzero(self.targets != IGNORE))

    @property
    def target_weight(self) -> float:
        """Sum of the weights of the targets: this pack's share of the loss denominator."""
        return target_weight(self.targets, self.weights)

    @property
    def doc_lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(b - a for a, b in itertools.pairwise((0, *self.doc_ends)))


def target_weight(targets: npt.NDArray[Any], weights: Float32 | None) -> float:
    """Sum of weights where `targets` [n] is not IGNORE, accumulated in float64."""
    trained = targets != IGNORE
    if weights is None:
        return float(np.count_nonzero(trained))
    return float(weights[trained].sum(dtype=np.float64))


def shift_targets(ids: npt.NDArray[Any], trained: Bool) -> Int32:
    """Next-token targets inside one document.

    Args:
        ids: [n] token ids.
        trained: [n] bool: tokens that the model must learn to produce. `trained[0]` counts for nothing, since no
            token comes before it.

    Returns:
        [n] int32: `ids[i + 1]` where `trained[i + 1]`, else IGNORE.
    """
    targets = np.full(ids.shape, IGNORE, dtype=np.int32)
    targets[:-1] = np.where(trained[1:], ids[1:], IGNORE)
    return targets


def shift_weights(weights: Float32) -> Float32:
    """Loss weights of tokens [n] to loss weights of their targets [n], as `shift_targets` does; the last is 1."""
    return np.append(weights[1:], np.float32(1))


def pack_documents(documents: Sequence[Document], pad_to: int | None = None) -> Pack:
    """Concatenates documents to one row.

    Args:
        documents: at least one, in order.
        pad_to: length T wanted; the missing rows become 1-token documents with position 0 and target IGNORE.

    Returns:
        Pack of T tokens; `weights` is None unless some document has weights (the others then count 1).

    Raises:
        DataError: no document, or more tokens than `pad_to`.
    """
    if not documents:
        raise DataError("a pack of no documents", fix="give pack_documents at least one document")
    lengths = [len(d) for d in documents]
    total = sum(lengths)
    num_pads = 0 if pad_to is None else pad_to - total
    if num_pads < 0:
        raise DataError(
            f"{len(documents)} documents of {total} tokens do not fit in pad_to={pad_to}",
            fix=f"set pad_to to {total} or more, or pack fewer documents",
        )
    ends = list(itertools.accumulate(lengths))
    positions = np.arange(total, dtype=np.int32)
    for document, start, end in zip(documents, [0, *ends], ends, strict=False):
        positions[start:end] += document.start_position - start
    weights = None
    if any(d.weights is not None for d in documents):
        parts = [np.ones(len(d), np.float32) if d.weights is None else d.weights for d in documents]
        weights = np.concatenate([*parts, np.ones(num_pads, np.float32)])
    return Pack(
        ids=np.concatenate([*(d.ids for d in documents), np.full(num_pads, PAD_ID, np.int32)]),
        targets=np.concatenate([*(d.targets for d in documents), np.full(num_pads, IGNORE, np.int32)]),
        weights=weights,
        position_ids=np.concatenate([positions, np.zeros(num_pads, np.int32)]),
        doc_ends=(*ends, *range(total + 1, total + num_pads + 1)),
        row_ids=(*(d.row_id for d in documents), *("",) * num_pads),
    )
