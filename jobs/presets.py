"""The CPU presets of `llama_128k.py`: the flagship's path with a model and data that any machine can make in seconds.

Guarantees: a preset changes defaults only, so every flag still overrides it; its tokenizer and rows are written under
the run's output folder, which all nodes share, and are the same bytes on a rerun, so that a run resumes. Costs a few
seconds: a byte-pair tokenizer is trained on standard-library sources, and the model is a small random Llama.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.stdlib_rows import source_files
from raycp.config import FitConfig, OptimConfig
from raycp.driver.cluster import connect, resolve_output_dir, total_resources, will_use_existing_cluster
from raycp.errors import ConfigError
from raycp.resolve import local_resources

VOCABULARY = 4096
LONG_SHARE = 0.6
"""Tokens of the first pack's long document, as a share of the pack: above one half, so that no second one fits."""

_LONG_PACKAGES = ("asyncio", "email", "multiprocessing", "xml", "unittest", "http", "concurrent", "importlib", "json")
_END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a preset hands to `fit`."""

    model: Any
    tokenizer: str
    data: str


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults of `llama_128k.py` for a machine without accelerators."""

    summary: str
    seq_length: int
    workers: int
    steps: int

    def config(self) -> FitConfig:
        """The flags' defaults under this preset."""
        return FitConfig(
            seq_length=self.seq_length,
            workers=self.workers,
            steps=self.steps,
            global_batch=1,
            device="cpu",
            dtype="float32",
            optim=OptimConfig(lr=1e-3),
        )

    def make(self, output_dir: str, config: FitConfig) -> Inputs:
        """Model, tokenizer and rows for `config.seq_length`, below the output folder.

        Raises:
            ConfigError: `output_dir` is relative inside a Ray job.
        """
        folder, problems = resolve_output_dir(output_dir)
        if folder is None:
            raise ConfigError.from_problems(problems)
        tokenizer, rows = make_inputs(folder / "inputs", config.seq_length)
        return Inputs(model=make_model(config.seq_length), tokenizer=str(tokenizer), data=str(rows))


PRESETS = {
    "tiny": Preset(
        summary="131 072 tokens on 4 CPU ranks, minutes a step on 2 cores", seq_length=131_072, workers=4, steps=2
    ),
    "smoke": Preset(
        summary="8 192 tokens on 2 CPU ranks, under 2 minutes in all on 2 cores", seq_length=8_192, workers=2, steps=2
    ),
}


def make_model(seq_length: int) -> Any:
    """A `LlamaConfig` of two layers whose positions reach `seq_length`; `fit` initialises it at random."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=seq_length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )


def make_inputs(folder: Path, seq_length: int) -> tuple[Path, Path]:
    """Writes tokenizer and rows into `folder` unless they are there; returns (tokenizer folder, rows file)."""
    tokenizer_folder, rows_file = folder / "tokenizer", folder / f"rows-{seq_length}.jsonl"
    if not tokenizer_folder.exists():
        aside = folder / f"tokenizer.{os.getpid()}"
        make_tokenizer().save_pretrained(aside)
        aside.rename(tokenizer_folder)
    if not rows_file.exists():
        from transformers import AutoTokenizer

        rows = packed_rows(AutoTokenizer.from_pretrained(tokenizer_folder), seq_length)
        aside = rows_file.with_suffix(f".{os.getpid()}")
        aside.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
        aside.replace(rows_file)
    return tokenizer_folder, rows_file


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of `VOCABULARY` tokens, trained on the standard library; each digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for _, text in source_files()), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)


def packed_rows(tokenizer: Any, seq_length: int) -> list[str]:
    """Texts that make two packs of `seq_length` tokens: a long document with small ones beside it, and one document.

    Lengths count the end-of-text token that a text row gets. The long document has `LONG_SHARE` of the pack, the
    small ones (a sixteenth of a pack at most) are whole source files that fill what it leaves, and the last text has
    `seq_length` tokens to the token.
    """
    pieces = list(source_files(_LONG_PACKAGES))
    long = exact_document(tokenizer, pieces, int(seq_length * LONG_SHARE))
    left = seq_length - int(seq_length * LONG_SHARE)
    rows = [long]
    for _, text in sorted(source_files(), key=lambda named: (-len(named[1]), named[0])):
        if not text.strip() or len(text) > seq_length // 2:
            continue
        size = _length(tokenizer, text)
        if size <= min(left, seq_length // 16):
            rows.append(text)
            left -= size
    return [*rows, exact_document(tokenizer, reversed(pieces), seq_length)]


def library_rows(seq_length: int) -> list[dict[str, str]]:
    """Text rows for a run without --data: each long package of the standard library as one document.

    A document is cut at two characters per token of the pack, which no tokenizer of text exceeds in practice.
    """
    texts = ("".join(text for _, text in source_files((package,))) for package in _LONG_PACKAGES)
    return [{"text": text[: 2 * seq_length]} for text in texts]


def missing_accelerators(config: FitConfig) -> str | None:
    """What a run with these flags lacks here, and the presets that run without it; None if nothing is missing.

    On a running cluster the cluster is asked. Elsewhere the device files of this machine are counted.
    """
    if config.device == "cpu":
        return None
    if will_use_existing_cluster():
        connect(workers=config.workers)
        resources, where = total_resources(), "the Ray cluster"
    else:
        resources, where = local_resources(), "this machine"
    found = {"npu": int(resources.get("NPU", 0)), "cuda": int(resources.get("GPU", 0))}
    usable = {name: count for name, count in found.items() if config.device in ("auto", name)}
    wanted = config.workers or 1
    if max(usable.values()) >= wanted:
        return None
    presets = "\n".join(f"  --preset {name:6} {preset.summary}" for name, preset in PRESETS.items())
    return (
        f"wanted: {wanted} accelerators (--workers {wanted} --device {config.device}); found on {where}: "
        f"{found['npu']} NPU, {found['cuda']} CUDA.\n"
        f"fix: run on a cluster that has them, set --workers to what there is, "
        f"or take a preset that runs on CPU:\n{presets}"
    )


def exact_document(tokenizer: Any, pieces: Iterable[tuple[str, str]], size: int) -> str:
    """Source files one after the other, cut at a line and filled up with digits to `size` tokens, end-of-text included.

    Raises:
        ValueError: the sources have fewer than `size` tokens.
    """
    body = size - 1
    text, tokens = "", 0
    for name, source in pieces:
        for line in f"# {name}\n{source}\n".splitlines(keepends=True):
            longer = tokens + len(tokenizer(line, add_special_tokens=False).input_ids)
            if longer > body:
                return _filled(tokenizer, text, body)
            text, tokens = text + line, longer
    raise ValueError(f"the standard-library packages have {tokens} tokens, but a document of {size} was asked for")


def _filled(tokenizer: Any, text: str, body: int) -> str:
    """`text`, with whole lines taken off or zeros added, at exactly `body` tokens: a zero is a token of its own."""
    while (missing := body - len(tokenizer(text, add_special_tokens=False).input_ids)) < 0:
        text = text[: text.rstrip("\n").rindex("\n") + 1]
    return text + "0" * missing


def _length(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False).input_ids) + 1
