"""Rows that hold token ids: one document, or several that were packed by another program.

Guarantees: nothing is added to the ids, no BOS and no EOS. `labels` follow Hugging Face's convention (one per id, not
shifted, -100 where untrained) and must be the ids themselves elsewhere; without them every token is trained. Documents
of a packed row are separated by `seq_lengths`, by an attention mask that numbers them (1 1 2 2 0, as --neat-pack of
MindSpeed-LLM and LLaMA-Factory writes it), or after every `eod_token_id`; lengths must agree with what else is given.
Rows that look packed (position ids that start again) and say no boundaries are refused, since their documents would
see each other.
"""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.document import IGNORE
from data_pipeline.examples import TokenRow, Tokens, bad, column, kind
from data_pipeline.rows import Row

_LENGTHS = ("seq_lengths", "seq_lens")
_MASKS = ("loss_mask", "assistant_masks", "completion_mask")

Ints = npt.NDArray[np.int64]


def parse_tokens(row: Row, eod_token_id: int | None, vocabulary: int) -> TokenRow:
    """Columns `input_ids`, and of each optionally: labels or a loss mask, weights, seq_lengths, attention_mask.

    Args:
        row: the row.
        eod_token_id: id that ends a document, or None.
        vocabulary: ids must be below it; 0: not checked.

    Raises:
        DataError: columns of other lengths or kinds, ids that no token has, boundaries that do not fit.
    """
    ids = _ints(row, "input_ids", column(row, "input_ids"))
    if not ids.size:
        raise bad(row, "input_ids", "is an empty list", "remove the row: it trains nothing")
    if ids.min() < 0 or (vocabulary and ids.max() >= vocabulary):
        odd = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise bad(
            row,
            "input_ids",
            f"holds {odd}, and the tokenizer has ids 0 to {vocabulary - 1}" if vocabulary else f"holds {odd}",
            "tokenize with the tokenizer of the model that is trained",
        )
    trained, weights = _trained(row, ids), _weights(row, ids)
    ends = _boundaries(row, ids, eod_token_id)
    _refuse_hidden_packing(row, ids, ends)

    def is_padding(start: int, end: int) -> bool:
        if eod_token_id is None or len(ends) == 1:
            return False
        if end - start == 1:
            return bool(ids[start] == eod_token_id)
        return end == ids.size and not trained[start:].any() and bool((ids[start:] == ids[start]).all())

    documents = [
        Tokens(ids[a:b], trained[a:b], None if weights is None else weights[a:b])
        for a, b in itertools.pairwise([0, *ends])
        if not is_padding(a, b)
    ]
    if not documents:
        raise bad(row, "input_ids", "is padding only", "remove the row: it trains nothing")
    return TokenRow(tuple(documents), packed=len(ends) > 1)


def _ints(row: Row, name: str, value: Any) -> Ints:
    if not isinstance(value, list | np.ndarray):
        raise bad(row, name, f"is {kind(value)}, not a list of whole numbers", f"make {name} a flat list in every row")
    array = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise bad(row, name, "is not a flat list of whole numbers", f"make {name} a flat list in every row")
    return array.astype(np.int64)


def _same_length(row: Row, name: str, array: npt.NDArray[Any], ids: Ints) -> None:
    if array.size != ids.size:
        raise bad(row, name, f"has {array.size} entries, input_ids {ids.size}", "write one for each token")


def _trained(row: Row, ids: Ints) -> npt.NDArray[np.bool_]:
    trained = np.ones(ids.size, np.bool_)
    if row.data.get("labels") is not None:
        labels = _ints(row, "labels", row.data["labels"])
        _same_length(row, "labels", labels, ids)
        trained = labels != IGNORE
        wrong = np.flatnonzero(trained & (labels != ids))
        if wrong.size:
            at = int(wrong[0])
            raise bad(
                row,
                "labels",
                f"[{at}] is {labels[at]}, input_ids[{at}] is {ids[at]}",
                "write labels that are the ids where trained and -100 elsewhere; they are shifted here, once",
            )
    for name in _MASKS:
        if row.data.get(name) is not None:
            mask = _ints(row, name, row.data[name])
            _same_length(row, name, mask, ids)
            trained &= mask != 0
    if row.data.get("attention_mask") is not None:
        mask = _ints(row, "attention_mask", row.data["attention_mask"])
        _same_length(row, "attention_mask", mask, ids)
        trained &= mask != 0
    return trained


def _weights(row: Row, ids: Ints) -> npt.NDArray[np.float32] | None:
    value = row.data.get("weights")
    if value is None:
        return None
    array = np.asarray(value) if isinstance(value, list | np.ndarray) else None
    if array is None or array.ndim != 1 or array.dtype.kind not in "iuf":
        raise bad(row, "weights", "is not a flat list of numbers", "write one number for each token")
    _same_length(row, "weights", array, ids)
    if not np.isfinite(array).all() or (array < 0).any():
        raise bad(row, "weights", "has a number below 0, or none", "write finite numbers of 0 or more")
    return array.astype(np.float32)


def _boundaries(row: Row, ids: Ints, eod_token_id: int | None) -> list[int]:
    """Ends of the documents of a row; the last may be before its end, where padding follows."""
    by_mask, real = _by_mask(row), _real_tokens(row, ids)
    by_eod: list[int] | None = None
    if eod_token_id is not None:
        by_eod = (np.flatnonzero(ids[:real] == eod_token_id) + 1).tolist()
        if not by_eod or by_eod[-1] != real:
            by_eod.append(real)
    name = next((n for n in _LENGTHS if row.data.get(n) is not None), None)
    if name is None:
        return by_mask or by_eod or [real]  # a document that was cut has a number, and no EOD
    lengths = _ints(row, name, row.data[name])
    lengths = lengths[lengths != 0]
    ends: list[int] = np.cumsum(lengths).tolist()
    if not ends or lengths.min() < 0 or ends[-1] > ids.size:
        raise bad(
            row,
            name,
            f"sums to {ends[-1] if ends else 0}, input_ids has {ids.size}",
            "write the length of each document, in order",
        )
    if by_mask is not None:
        if by_mask != ends:
            at = min(set(by_mask) ^ set(ends))
            raise bad(
                row,
                name,
                f"and attention_mask differ on whether a document ends at token {at}",
                "repair one of them, or leave the attention mask out",
            )
        return ends
    if by_eod is not None and not set(ends[:-1]) <= set(by_eod):
        at = next(end for end in ends if end not in by_eod)
        raise bad(
            row,
            name,
            f"ends a document at token {at}, which is not after eod_token_id={eod_token_id}",
            "leave data.eod_token_id out, or repair the lengths",
        )
    return ends


def _by_mask(row: Row) -> list[int] | None:
    """Ends of the documents that an attention mask numbers, as in 1 1 2 2 2 0; None: it does not."""
    value = row.data.get("attention_mask")
    if value is None:
        return None
    mask = _ints(row, "attention_mask", value)
    if mask.max(initial=0) <= 1:
        return None
    mask = mask[: int(np.flatnonzero(mask)[-1]) + 1]
    if mask.min() < 1 or (mask[1:] < mask[:-1]).any():
        at = int(np.flatnonzero((mask[1:] < mask[:-1]) | (mask[1:] < 1) | (mask[0] < 1))[0]) + 1
        raise bad(
            row,
            "attention_mask",
            f"goes from {mask[at - 1]} to {mask[at]} at token {at}: it does not number documents",
            "number them 1, 2, 3, ... with 0 for padding at the end, or write a mask of 0 and 1",
        )
    return [*(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), int(mask.size)]


def _real_tokens(row: Row, ids: Ints) -> int:
    """Tokens before the padding that an attention mask of zeros shows."""
    value = row.data.get("attention_mask")
    if value is None:
        return int(ids.size)
    real = np.flatnonzero(_ints(row, "attention_mask", value))
    return int(real[-1]) + 1 if real.size else int(ids.size)


def _refuse_hidden_packing(row: Row, ids: Ints, ends: list[int]) -> None:
    value = row.data.get("position_ids")
    if len(ends) > 1 or value is None:
        return
    positions = _ints(row, "position_ids", value)[: ends[0]]
    if (positions[1:] < positions[:-1]).any():
        raise bad(
            row,
            "position_ids",
            "shows several documents in this row, and nothing says where they end",
            "add a column seq_lengths, or set data.eod_token_id",
        )
