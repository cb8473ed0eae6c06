"""Text to token ids with character offsets, on one tokenizer.

Guarantees: tokens are those of the tokenizer, no more and no less: nothing is added around a text here. What a user
wrote and merely looks like a special token ("<|im_end|>" inside a message) can be protected: it is then encoded as
plain characters, so that data cannot forge a turn. Where a token would straddle the border between what a model is
given and what it has to say, the text can be encoded in two pieces, which is what the model sees when it is used.
Cost: one pass of the (fast) tokenizer per text, and a few tokens more per cut.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raycp.errors import ModelError

Int64 = npt.NDArray[np.int64]

_OPEN, _CLOSE = "\ue000", "\ue001"  # private use: around the number of a protected piece while a template runs
_PROTECTED = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_WINDOW_CACHE = 4096


class Tokenizer(Protocol):
    """What is used of a Hugging Face fast tokenizer."""

    is_fast: bool
    name_or_path: str
    bos_token_id: int | None
    eos_token_id: int | None
    eos_token: str | None
    special_tokens_map: Any
    added_tokens_decoder: Any
    backend_tokenizer: Any

    def __len__(self) -> int: ...
    def __call__(self, text: Any, **kwargs: Any) -> Any: ...
    def convert_ids_to_tokens(self, ids: Any) -> Any: ...
    def get_chat_template(self, chat_template: Any = None, tools: Any = None) -> str: ...


class Encoded:
    """Tokens of a text.

    Args:
        ids: [n] int64.
        spans: gives ([n] first character, [n] the character just after) of each token; asked for once, when needed,
            since that takes half as long as encoding and plain text does not need it.
    """

    def __init__(self, ids: Int64, spans: Callable[[], tuple[Int64, Int64]]) -> None:
        self.ids = ids
        self._ask = spans

    @cached_property
    def _spans(self) -> tuple[Int64, Int64]:
        return self._ask()

    @property
    def starts(self) -> Int64:
        """[n] first character of each token."""
        return self._spans[0]

    @property
    def ends(self) -> Int64:
        """[n] the character just after each token."""
        return self._spans[1]

    def count_before(self, cut: int) -> int:
        """Tokens that end at or before character `cut`."""
        return int(np.searchsorted(self.ends, cut, side="right"))


class Encoder:
    """A tokenizer with its facts worked out once.

    Raises:
        ModelError: the tokenizer is not a fast one (it could not say which characters a token covers).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.is_fast:
            raise ModelError(
                f"tokenizer {tokenizer.name_or_path!r} ({type(tokenizer).__name__}) is not a fast tokenizer",
                fix="load it with use_fast=True, or convert it to tokenizer.json",
            )
        self.tokenizer = tokenizer
        self.bos_id = tokenizer.bos_token_id
        self.eos_id = tokenizer.eos_token_id
        added = tokenizer.added_tokens_decoder
        self.added_ids = np.array(sorted(added), dtype=np.int64)
        """Ids that are one unit in every text: special tokens, and others that were added."""
        eos = [] if self.eos_id is None else [self.eos_id]
        self.stop_ids = np.union1d(self.added_ids, np.array(eos, dtype=np.int64))
        """Ids that can end a turn."""
        names = {str(token.content) for token in added.values() if token.special} | {_OPEN, _CLOSE}
        self._special = re.compile("|".join(re.escape(n) for n in sorted(names, key=len, reverse=True)))
        self.prefix_ids = self._find_prefix()
        """Ids that the tokenizer puts before plain text: its BOS, or nothing."""
        self._window_ids: dict[str, Int64] = {}

    def digest(self) -> str:
        """sha256 of everything that decides how text becomes ids."""
        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
        facts = [state, {k: str(v) for k, v in self.tokenizer.special_tokens_map.items()}]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def protect(self, text: str, literals: list[str]) -> str:
        """`text` with whatever looks like a special token replaced by a mark; what it was is appended to `literals`."""

        def mark(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{_OPEN}{len(literals) - 1}{_CLOSE}"

        return self._special.sub(mark, text)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts without marks, without special tokens of the tokenizer's own."""
        if not texts:
            return []
        out = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return [_encoded(encoding) for encoding in out.encodings]

    def encode(self, text: str, literals: Sequence[str] = (), cuts: Sequence[int] = ()) -> Encoded:
        """Encodes one text, with marks of `protect`; every one of `cuts` (characters) becomes a token border.

        Offsets are those of `text`, marks included: a protected piece covers its mark.
        """
        pieces, place = [], 0
        marks = [(m.start(), m.end(), literals[int(m.group(1))]) for m in _PROTECTED.finditer(text)] if literals else []
        for start, end, literal in [*marks, (len(text), len(text), "")]:
            borders = [place, *sorted({c for c in cuts if place < c < start}), start]
            for a, b in itertools.pairwise(borders):
                if b > a:
                    pieces.append(_shifted(self.encode_batch([text[a:b]])[0], a))
            if literal:
                ids = self.tokenizer([literal], add_special_tokens=False, split_special_tokens=True, verbose=False)
                plain = np.array(ids.encodings[0].ids, dtype=np.int64)
                pieces.append(_known(plain, np.full(plain.size, start), np.full(plain.size, end)))
            place = end
        if not pieces:
            return _known(*(np.zeros(0, np.int64),) * 3)
        return _known(
            np.concatenate([p.ids for p in pieces]),
            np.concatenate([p.starts for p in pieces]),
            np.concatenate([p.ends for p in pieces]),
        )

    def straddled(self, text: str, encoded: Encoded, cut: int, literals: Sequence[str] = ()) -> bool:
        """True if the tokens before `cut` differ from the tokens that `text[:cut]` has by itself.

        Added tokens are borders in every text, so only the window from the last one before the cut is looked at.
        """
        count = encoded.count_before(cut)
        added = np.flatnonzero(np.isin(encoded.ids[:count], self.added_ids))
        first = int(added[-1]) if added.size else 0
        window = text[int(encoded.starts[first]) if added.size else 0 : cut]
        return not np.array_equal(self._encode_window(window, literals), encoded.ids[first:count])

    def _encode_window(self, window: str, literals: Sequence[str]) -> Int64:
        if literals:
            return self.encode(window, literals).ids
        if window not in self._window_ids:
            ids = self.encode(window).ids
            if len(window) > 256 or len(self._window_ids) >= _WINDOW_CACHE:
                return ids
            self._window_ids[window] = ids
        return self._window_ids[window]

    def _find_prefix(self) -> Int64:
        bare = list(self.tokenizer("a", add_special_tokens=False)["input_ids"])
        full = list(self.tokenizer("a")["input_ids"])
        place = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
        return np.array(full[:place], dtype=np.int64)


def _encoded(encoding: Any) -> Encoded:
    def spans() -> tuple[Int64, Int64]:
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return offsets[:, 0], np.maximum.accumulate(offsets[:, 1])

    return Encoded(np.array(encoding.ids, dtype=np.int64), spans)


def _known(ids: Int64, starts: Int64, ends: Int64) -> Encoded:
    return Encoded(ids, lambda: (starts, ends))


def _shifted(encoded: Encoded, by: int) -> Encoded:
    return encoded if by == 0 else _known(encoded.ids, encoded.starts + by, encoded.ends + by)
