"""The jobs: rows and presets that are the same every time, flags for every number, and a clear refusal."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import flags, llama_128k, presets, quickstart, stdlib_rows
from raycp import config
from raycp.config import FitConfig

ROOT = Path(__file__).resolve().parents[2]


def run_job(script: str, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / script), *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=250)


# Rows of the quickstart


def test_quickstart_rows_are_the_same_on_every_call_and_in_every_process() -> None:
    code = "import json, jobs.quickstart as q; print(json.dumps(q.demo_rows(2048)))"
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(other.stdout) == [list(part) for part in quickstart.demo_rows(2048)]


def test_nothing_held_out_is_trained_on() -> None:
    train, held_out = quickstart.demo_rows(2048)
    assert shared_texts(train, held_out) == set()
    assert shared_texts([*train, held_out[0]], held_out) != set()
    assert quickstart.QUESTION in {row["messages"][0]["content"] for row in stdlib_rows.docstring_chats().held_out}


def shared_texts(left: list[stdlib_rows.Row], right: list[stdlib_rows.Row]) -> set[str]:
    """Questions and answers that both lists have."""
    return {m["content"] for r in left for m in r["messages"]} & {m["content"] for r in right for m in r["messages"]}


def test_quickstart_has_enough_rows_and_whole_source_files() -> None:
    train, held_out = quickstart.demo_rows(2048)
    assert len(train) > 300
    assert len(held_out) == quickstart.HELD_OUT_ROWS
    answers = [row["messages"][1]["content"] for row in train]
    sources = dict(stdlib_rows.source_files())
    whole = [answer for answer in answers if answer in sources.values()]
    assert len(whole) == quickstart.LONG_DOCUMENTS
    assert all(2000 < len(text) < 2 * 2048 for text in whole)


def test_quickstart_without_its_model_names_the_command(tmp_path: Path) -> None:
    """An interpreter that does not see the package: -S leaves site-packages out."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import jobs.quickstart as q\n"
        "try: q.demo_model()\nexcept q.ModelError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "make demo" in done.stdout


# Presets of the flagship


@pytest.mark.parametrize("seq_length", [8192, 131_072])
def test_preset_rows_fill_two_packs(seq_length: int, tmp_path: Path) -> None:
    """A document of more than half a pack with small ones beside it, and one document of a pack to the token."""
    from transformers import AutoTokenizer

    tokenizer_folder, rows_file = presets.make_inputs(tmp_path, seq_length)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    texts = [json.loads(line)["text"] for line in rows_file.read_text().splitlines()]
    lengths = [len(tokenizer(text).input_ids) + 1 for text in texts]
    assert lengths[-1] == seq_length
    assert lengths[0] == int(seq_length * presets.LONG_SHARE) > seq_length // 2
    assert seq_length * 0.75 < sum(lengths[:-1]) <= seq_length
    assert len(lengths) > 4


def test_preset_inputs_are_the_same_bytes_again(tmp_path: Path) -> None:
    first, second = (presets.make_inputs(tmp_path / name, 8192) for name in ("one", "two"))
    assert first[1].read_bytes() == second[1].read_bytes()
    assert (first[0] / "tokenizer.json").read_bytes() == (second[0] / "tokenizer.json").read_bytes()
    before = first[1].stat().st_mtime_ns
    assert presets.make_inputs(tmp_path / "one", 8192)[1].stat().st_mtime_ns == before


def test_a_document_longer_than_the_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="have 2 tokens, but a document of 100"):
        presets.exact_document(OneTokenPerLine(), [("m", "a = 1")], 100)


class OneTokenPerLine:
    """A tokenizer of one token a line, enough to count with."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> "OneTokenPerLine":
        self.input_ids = text.splitlines()
        return self


# Flags


def test_every_field_of_the_configuration_is_a_flag() -> None:
    done = run_job("llama_128k.py", "--help")
    assert done.returncode == 0
    for owner in flags._parts(FitConfig()).values():
        for name, _, _ in flags._fields(owner):
            flag = {"name": "optimizer"}.get(name, name).replace("_", "-")
            assert f"--{flag} " in done.stdout, flag


def test_flags_list_every_choice_that_the_configuration_has() -> None:
    """--kv-cache showed KV_CACHE in place of its words."""
    constants = {name: value for name, value in vars(config).items() if name.isupper() and isinstance(value, tuple)}
    assert "KV_CACHES" in constants
    assert {name for name, value in constants.items() if value not in flags._CHOICES.values()} == set()
    parser = argparse.ArgumentParser()
    flags.add_config_flags(parser, FitConfig())
    assert "--kv-cache none|half|full" in " ".join(parser.format_help().split())


def test_flags_give_back_the_defaults_and_read_each_type() -> None:
    import argparse

    defaults = FitConfig(workers=8)
    parser = argparse.ArgumentParser()
    flags.add_config_flags(parser, defaults)
    assert flags.config_from_flags(parser.parse_args([]), defaults) == defaults
    words = "--seq-length 4096 --steps none --cp 4 --dp auto --lr 3e-4 --clip none --betas 0.9 0.95 --keep 1 --warmup 2"
    read = flags.config_from_flags(parser.parse_args(words.split()), defaults)
    assert (read.seq_length, read.steps, read.parallel.cp, read.parallel.dp) == (4096, None, 4, "auto")
    assert (read.optim.lr, read.optim.clip, read.optim.betas, read.optim.warmup) == (3e-4, None, (0.9, 0.95), 2.0)
    assert read == dataclasses.replace(
        defaults, seq_length=4096, parallel=read.parallel, optim=read.optim, elastic=read.elastic
    )


def test_a_word_that_is_no_number_is_refused_with_the_flag() -> None:
    done = run_job("llama_128k.py", "--preset", "smoke", "--cp", "many")
    assert done.returncode == 2
    assert "--cp" in done.stderr


def test_problems_with_the_flags_come_before_anything_is_made(tmp_path: Path) -> None:
    words = ["--preset", "smoke", "--workers", "3", "--cp", "2", "--lr", "0", "--layout", "spiral"]
    done = run_job("llama_128k.py", *words, "--output-dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert all(word in done.stderr for word in ("3 problem(s)", "optim.lr", "parallel.layout", "does not divide"))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/dev").glob("davinci[0-9]*")), reason="has one")
def test_without_accelerators_the_flagship_says_what_is_missing_and_names_the_presets() -> None:
    done = run_job("llama_128k.py")
    assert done.returncode == 2
    assert "wanted: 8 accelerators" in done.stderr
    assert "0 NPU, 0 CUDA" in done.stderr
    assert all(f"--preset {name}" in done.stderr for name in llama_128k.PRESETS)
