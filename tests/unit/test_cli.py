import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from jobs.presets import make_tokenizer
from raycp.cli import main
from raycp.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chats(tmp_path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {"conversations": [{"from": "human", "value": f"question {i}"}, {"from": "gpt", "value": "answer " * (i + 1)}]}
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(capsys, *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_entry_point_is_this_function():
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["raycp"]
    module, _, function = name.partition(":")
    assert getattr(import_module(module), function) is main


def test_help_names_every_command_and_loads_no_torch():
    code = "import sys; from raycp.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'ray', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert all(name in done.stdout for name in COMMANDS)


def test_inspect_shows_everything(capsys, model, chats, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = call(
        capsys, "inspect", str(chats), "--model", model, "--seq-length", "128", "--html", str(page), "--cp", "2"
    )
    assert code == 0, err
    for part in (
        f"detected  sharegpt, 30 rows ({chats}); trained: assistant by prefix rendering",
        "rows      30 -> 30 documents",
        "lengths   p50 ",
        "packs     ",
        "% full",
        "pack 0 of ",
        "chats.jsonl:",
        "[answer answer ",
        "rank 0: ",
        "of the work",
        f"page      {page}",
    ):
        assert part in out, part
    html = page.read_text()
    assert "<svg" in html
    assert "class=trained" in html


def test_inspect_of_a_part_with_weights_and_other_settings(capsys, model, chats, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"body": "some words " * i}) + "\n" for i in range(1, 20)))
    code, out, err = call(
        capsys,
        *("inspect", str(texts), str(texts), "--model", model, "--seq-length", "64", "--rows", "10"),
        *("--weights", "2", "0.5", "--data.columns", "text=body", "--data.packing", "first_fit", "--cp", "1"),
    )
    assert code == 0, err
    assert "text, 10 rows, weight 2" in out
    assert "(first_fit)" in out
    assert "25 documents" in out
    assert "rank 0" not in out


def test_a_kept_folder_is_found_again(capsys, model, chats, tmp_path):
    words = ("inspect", str(chats), "--model", model, "--seq-length", "128", "--folder", str(tmp_path / "kept"))
    first = call(capsys, *words)
    assert first[0] == 0
    assert call(capsys, *words)[1] == first[1]
    assert len(list((tmp_path / "kept").glob("*/meta.json"))) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspekt"], 2, "inspect"),
        ([], 2, "Missing subcommand"),
        (["inspect", "missing.jsonl", "--model", "{model}"], 1, "raycp: DataError: there is no file or folder"),
        (["inspect", "--model", "{model}"], 1, "no data was named"),
        (["inspect", "x.jsonl"], 2, "--model"),
        (
            ["inspect", "x.jsonl", "--model", "{model}", "--data.overflow", "cut"],
            1,
            "data.overflow='cut' is not a choice",
        ),
        (["inspect", "x.jsonl", "--model", "{model}", "--data.overflo", "drop"], 2, "--data.overflow"),
        (["inspect", "x.jsonl", "--model", "{model}", "--weights", "1", "2"], 1, "2 weights for 1 sources"),
        (["inspect", "x.jsonl", "--model", "{model}", "--seq-length", "many"], 2, "seq-length"),
        (["inspect", "x.jsonl", "--model", "/nowhere/model"], 1, "no such file or folder"),
        (["inspect", "x.jsonl", "--model", "{model}", "--rows", "-1"], 1, "--rows -1 is below 1"),
        (["inspect", "x.jsonl", "--model", "{model}", "--tokens", "0", "--cp", "0"], 1, "--cp 0 is below 1"),
        (["inspect", "x.jsonl", "--model", "{model}", "--packs", "-2"], 1, "--packs -2 is negative"),
        (["inspect", "x.jsonl", "--model", "{model}", "--html", "{model}/tokenizer.json/x.html"], 1, "--html: "),
        (["inspect", "x.jsonl", "--model", "{model}", "--folder", "{model}/tokenizer.json"], 1, "--folder: "),
    ],
)
def test_errors_are_said_without_a_traceback(capsys, model, words, code, message):
    got, out, err = call(capsys, *(word.format(model=model) for word in words))
    assert (got, message in out + err) == (code, True), out + err
    assert "Traceback" not in out + err
    if code == 1:
        assert "fix: " in err


def test_the_first_rows_leave_out_what_cannot_be_read_if_that_is_asked_for(capsys, model, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b"}\n{"text": \n{"text": "c d"}\n')
    words = ("inspect", str(path), "--model", model, "--seq-length", "64", "--rows", "2", "--cp", "1")
    code, _, err = call(capsys, *words)
    assert (code, f"{path}:2: broken JSON, Expecting value at column 9" in err) == (1, True), err
    code, out, err = call(capsys, *words, "--data.on-bad-row", "skip")
    assert code == 0, err
    assert f"left out  {path}:2: broken JSON" in out
    assert "2 documents" in out


def test_a_long_document_is_said_before_anything_is_trained(capsys, model, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": "words and words " * 400}) + "\n")
    code, _, err = call(capsys, "inspect", str(path), "--model", model, "--seq-length", "64")
    assert code == 1
    assert "have more than seq_length=64 tokens; the longest has" in err
    assert f"row {path}:1" in err
