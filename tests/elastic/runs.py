"""A run of a tiny random Llama on real Ray workers, shared by the tests of this folder."""

import argparse
import inspect
import json
from pathlib import Path
from typing import Any

import raycp
from jobs.presets import make_tokenizer
from raycp.events import read_events

STEPS = 6
GLOBAL_BATCH = 3


def make_folder(folder: Path) -> dict[str, Any]:
    """Tokenizer and rows; what `fit` needs beside an output folder and a configuration."""
    from transformers import LlamaConfig

    make_tokenizer().save_pretrained(folder / "tokenizer")
    pieces = inspect.getsource(argparse).split("\n    def ")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    model = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=0,
    )
    return {"model": model, "data": folder / "rows.jsonl", "tokenizer": str(folder / "tokenizer")}


def config(workers: int = 2, cp: int = 2, **elastic: Any) -> raycp.FitConfig:
    """A run of `STEPS` steps over more than one epoch, a checkpoint every second step."""
    return raycp.FitConfig(
        seq_length=1024,
        steps=STEPS,
        global_batch=GLOBAL_BATCH,
        workers=workers,
        device="cpu",
        parallel=raycp.ParallelConfig(cp=cp),
        optim=raycp.OptimConfig(lr=1e-2, weight_decay=0.1),
        data=raycp.DataConfig(overflow="split"),
        elastic=raycp.ElasticConfig(**{"checkpoint_every": 2, "wait_for_capacity": 30.0} | elastic),
    )


def pack_ids(result: raycp.FitResult) -> list[int]:
    """Packs of all `step` events, in the order of the log."""
    return [p for e in read_events(result.events_path) if e["event"] == "step" for p in e["pack_ids"]]
