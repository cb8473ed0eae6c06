"""Data as people have it, looked at by the command and trained on by `fit`: the two see the same."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

import raycp
from jobs.presets import make_tokenizer
from raycp.events import read_events

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str, str, str]:
    """(model folder with a tokenizer, alpaca file, sharegpt file with two bad rows)."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    alpaca = tmp_path / "alpaca.json"
    rows = [{"instruction": f"say {i}", "input": "", "output": "word " * (i + 1)} for i in range(12)]
    alpaca.write_text(json.dumps(rows, indent=1))
    talks: list[list[dict[str, str]]] = [
        [{"from": "human", "value": f"ask {i}"}, {"from": "gpt", "value": "tell " * (i + 2)}] for i in range(10)
    ]
    lines = [json.dumps({"conversations": talk}) for talk in talks]
    sharegpt = tmp_path / "sharegpt.jsonl"
    sharegpt.write_text("\n".join([*lines[:4], '{"conversations": ', '{"conversations": []}', *lines[4:]]))
    return str(tmp_path / "model"), str(alpaca), str(sharegpt)


def test_inspect_and_fit_see_the_same_documents(
    inputs: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, alpaca, sharegpt = inputs
    words = [*("inspect", alpaca, sharegpt, "--weights", "1", "2", "--model", model, "--seq-length", "64")]
    words += ["--data.on-bad-row", "skip", "--cp", "2", "--html", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-m", "raycp.cli", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "alpaca, 12 rows" in done.stdout
    assert "sharegpt, 12 rows, weight 2" in done.stdout
    assert "skipped   2 rows that cannot be used" in done.stdout
    assert "rank 1: " in done.stdout
    assert "<svg" in (tmp_path / "page.html").read_text()
    tiny = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    result = raycp.fit(
        LlamaConfig(**tiny, num_attention_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=0),
        {alpaca: 1, sharegpt: 2},
        tokenizer=model,
        output_dir=tmp_path / "run",
        config=raycp.FitConfig(
            seq_length=64,
            workers=1,
            device="cpu",
            steps=2,
            global_batch=2,
            data=raycp.DataConfig(on_bad_row="skip"),
        ),
    )
    said = capsys.readouterr().err
    for line in (r"rows .*", r"lengths .*", r"packs .*"):
        (seen,) = re.findall(rf"^{line}$", done.stdout, re.MULTILINE)[:1]
        assert seen in said, "the report before training is the one of inspect"
    steps = [event for event in read_events(result.events_path) if event["event"] == "step"]
    assert len(steps) == 2
    assert all(0 <= step["data_seconds"] <= step["seconds"] for step in steps)
    (skipped,) = (tmp_path / "run" / "data").glob("*/skipped.jsonl")
    assert [json.loads(line)["row"] for line in skipped.read_text().splitlines()] == [f"{sharegpt}:5", f"{sharegpt}:6"]
