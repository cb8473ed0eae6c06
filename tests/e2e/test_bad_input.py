"""What cannot be a run is refused before any worker starts, all problems in one report, each with its fix."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from transformers import LlamaConfig

import raycp
from jobs.presets import make_tokenizer


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = make_tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    made.save_pretrained(folder)
    return str(folder)


def model(**changed: Any) -> LlamaConfig:
    sizes = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, "bos_token_id": None, "eos_token_id": 0, **changed})


def refused(tmp_path: Path, tokenizer: str, source: Any, *, of: Any = None, **config: Any) -> raycp.RaycpError:
    settings = {"seq_length": 64, "workers": 1, "device": "cpu", "steps": 1} | config
    with pytest.raises(raycp.RaycpError) as caught:
        raycp.fit(
            of or model(), source, tokenizer=tokenizer, output_dir=tmp_path / "out", config=raycp.FitConfig(**settings)
        )
    assert caught.value.fix or "fix:" in str(caught.value)
    assert not (tmp_path / "out" / "events.jsonl").exists()
    return caught.value


def rows_file(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return path


GOOD = json.dumps({"text": "a short text"})


def test_all_configuration_problems_come_in_one_report(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    error = refused(
        tmp_path,
        tokenizer,
        tmp_path / "missing.jsonl",
        of=tmp_path / "no-model",
        workers=8,
        seq_length=0,
        parallel=raycp.ParallelConfig(cp=3, dp=2),
        optim=raycp.OptimConfig(lr=-1.0),
    )
    assert isinstance(error, raycp.ConfigError)
    text = str(error)
    for part in (
        "seq_length=0",
        "parallel.cp=3 x parallel.dp=2 = 6 ranks, but workers=8",
        "optim.lr=-1.0",
        "no-model",
        "missing.jsonl",
        "workers=8, and the cluster has 2 CPU in all",
    ):
        assert part in text, part
    assert text.startswith("6 problem(s)")


def test_a_missing_and_an_empty_file(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    assert "missing.jsonl" in str(refused(tmp_path, tokenizer, tmp_path / "missing.jsonl"))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "empty.jsonl is empty" in str(refused(tmp_path, tokenizer, empty))


def test_a_row_of_the_wrong_shape_is_named_by_its_line(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    error = refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD, GOOD, '{"text": 7}'))
    assert isinstance(error, raycp.DataError)
    assert "rows.jsonl:3" in str(error)
    assert "rows.jsonl:2" in str(refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD, '{"text": "torn')))


def test_a_template_that_trains_no_token(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data = raycp.DataConfig(
        chat_template="{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    error = refused(tmp_path, tokenizer, rows_file(tmp_path, json.dumps({"messages": chat})), data=data)
    assert "template" in str(error)


def test_a_document_longer_than_the_model_has_positions(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    data = rows_file(tmp_path, json.dumps({"text": "1 2 3 4 5 6 7 8 9 " * 20}), GOOD)
    error = refused(tmp_path, tokenizer, data, seq_length=1024)
    assert "the model has 64 positions" in str(error)


def test_more_workers_than_the_cluster_has(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    error = refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD), workers=3)
    assert "workers=3, and the cluster has 2 CPU in all" in str(error)


def test_workers_not_said_on_an_existing_cluster(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    assert "workers is not set" in str(refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD), workers=None))


def test_an_accelerator_that_is_not_there(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    error = refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD), device="npu")
    assert "takes one NPU a rank, and no node of the cluster offers any" in str(error)
    assert "CPU" in str(error)


def test_a_model_type_that_was_not_shown_to_be_exact(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    from transformers import MixtralConfig

    error = refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD), of=MixtralConfig(vocab_size=4096))
    assert "mixtral" in str(error)


def test_a_tokenizer_larger_than_the_vocabulary(cluster: None, tmp_path: Path, tokenizer: str) -> None:
    error = refused(tmp_path, tokenizer, rows_file(tmp_path, GOOD), of=model(vocab_size=100))
    assert "4096 tokens" in str(error)
    assert "vocabulary of 100" in str(error)
