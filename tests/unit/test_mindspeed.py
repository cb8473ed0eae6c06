"""MindSpeed's names: what each becomes, what is said about it, what is refused."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from raycp.config import FitConfig, ParallelConfig
from raycp.errors import ConfigError
from raycp.mindspeed import ALGORITHMS, FLAGS, Migration, from_mindspeed

ROOT = Path(__file__).resolve().parents[2]
PACKED = {"reset_position_ids": True, "reset_attention_mask": True}


def read(**flags: Any) -> Migration:
    return from_mindspeed({**PACKED, **flags})


def parallel(**flags: Any) -> ParallelConfig:
    return read(**flags).checked().parallel


@pytest.mark.parametrize(
    ("name", "algorithm", "layout"),
    [
        ("megatron_cp_algo", "ring", "auto"),
        ("ulysses_cp_algo", "ulysses", "auto"),
        ("hybrid_cp_algo", "hybrid", "auto"),
        ("kvallgather_cp_algo", "allgather", "auto"),
        ("adaptive_cp_algo", "ring", "balanced"),
        ("hybrid_adaptive_cp_algo", "hybrid", "balanced"),
    ],
)
def test_each_algorithm(name: str, algorithm: str, layout: str) -> None:
    got = parallel(context_parallel_size=8, context_parallel_algo=name)
    assert (got.cp, got.algorithm, got.layout, got.ulysses) == (8, algorithm, layout, "auto")
    assert name in ALGORITHMS


def test_shapes_and_lengths() -> None:
    config = read(
        context_parallel_size=8,
        context_parallel_algo="hybrid_cp_algo",
        ulysses_degree_in_cp=2,
        cp_window_size=2,
        context_parallel_kv_cache_policy="half",
        seq_length=65_536,
    ).checked()
    assert config.seq_length == 65_536
    assert config.parallel == ParallelConfig(cp=8, algorithm="hybrid", ulysses=2, window=2, kv_cache="half")


def test_names_with_dashes_and_the_words_of_a_script_are_the_same() -> None:
    want = read(context_parallel_size=4, context_parallel_algo="ulysses_cp_algo", seq_length=4096)
    dashed = from_mindspeed(
        {
            "--context-parallel-size": "4",
            "context-parallel-algo": "ulysses_cp_algo",
            "--seq-length": "4096",
            "--reset-position-ids": True,
            "--reset-attention-mask": True,
        }
    )
    script = from_mindspeed(
        "python pretrain.py --context-parallel-size 4 \\\n --context-parallel-algo=ulysses_cp_algo --seq-length 4096 "
        "--reset-position-ids --reset-attention-mask"
    )
    assert dashed == script == want or (dashed.config, dashed.notes) == (script.config, script.notes)
    assert (want.config, want.notes) == (script.config, script.notes)


def test_other_fields_of_a_configuration_are_kept() -> None:
    base = FitConfig(steps=7, parallel=ParallelConfig(shard="none", layout="contiguous"))
    got = from_mindspeed({**PACKED, "context_parallel_size": 2}, config=base).checked()
    assert (got.steps, got.parallel.shard, got.parallel.layout, got.parallel.cp) == (7, "none", "contiguous", 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"use_cp_send_recv_overlap": True}, "overlap is always on"),
        ({"kv_head_repeat_before_uly_alltoall": True}, "no key/value head is repeated"),
        ({"attention_mask_type": "general"}, "causal inside each document"),
        ({"reset_attention_mask": False}, "never see each other"),
        ({"reset_position_ids": False}, "positions restart"),
        ({}, "MindSpeed's default"),
        ({"context_parallel_algo": "hybrid_cp_algo", "context_parallel_size": 4}, "ulysses_degree_in_cp was not given"),
        ({"context_parallel_algo": "ulysses_cp_algo"}, "nothing to split"),
        (
            {"context_parallel_algo": "megatron_cp_algo", "ulysses_degree_in_cp": 2},
            "ulysses_degree_in_cp=2 is not used",
        ),
        ({"lr": 1e-5, "bf16": True}, "not read, since they say nothing about context parallelism: bf16, lr"),
        (
            {
                "context_parallel_size": 8,
                "context_parallel_algo": "ulysses_cp_algo",
                "context_parallel_kv_cache_policy": "full",
            },
            "nothing is repeated or kept",
        ),
    ],
)
def test_notes(flags: dict[str, Any], said: str) -> None:
    migration = read(**flags)
    assert migration.problems == ()
    assert any(said in note for note in migration.notes), migration.notes


def test_short_chunks_are_warned_about_with_a_computed_number() -> None:
    flags = {**PACKED, "context_parallel_size": 8, "context_parallel_algo": "megatron_cp_algo"}

    def warning(seq_length: int, heads: int, kv_heads: int) -> list[str]:
        migration = from_mindspeed({**flags, "seq_length": seq_length}, num_heads=heads, num_kv_heads=kv_heads)
        return [note for note in migration.notes if "to hide its traffic" in note]

    assert "holds 4096 tokens a rank, and needs 16000" in warning(32_768, 32, 32)[0]
    assert warning(32_768, 32, 8) == [], "4 query heads to a key/value head: 4000 are enough"
    assert "needs 4000" in warning(16_384, 32, 8)[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=2"),
        ({"pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size=4"),
        ({"position_embedding_type": "alibi"}, "ALiBi"),
        ({"use_alibi_mask": True}, "ALiBi"),
        ({"use_kv_cache": True}, "generation"),
        ({"multi_latent_attention": True}, "MLA"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"context_parallel_algo": "deepseek_v4_cp_algo"}, "deepseek_v4_cp_algo"),
        ({"context_parallel_size": 0}, "context_parallel_size=0"),
        ({"context_parallel_cache_interval": 1}, "cache_interval=1"),
        ({"context_parallel_size": 6, "cp_window_size": 4}, "window=4 does not divide the ring of 6"),
        (
            {"context_parallel_size": 8, "context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 3},
            "ulysses=3 does not divide",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_fix(flags: dict[str, Any], said: str) -> None:
    migration = read(**flags)
    (problem,) = migration.problems
    assert said in problem.message
    assert problem.fix


def test_all_problems_come_at_once() -> None:
    migration = read(tensor_model_parallel_size=8, use_kv_cache=True, hidden_dropout=0.1, seq_length="many")
    with pytest.raises(ConfigError) as caught:
        migration.checked()
    assert len(caught.value.details["problems"]) == 4


@pytest.mark.parametrize("flag", [f for f in FLAGS if " " not in f.name], ids=lambda f: f.name)
def test_every_flag_of_the_table_is_read(flag: Any) -> None:
    assert not any("not read" in note for note in read(**{flag.name: "1"}).notes)


def test_the_table_in_the_documentation_is_current() -> None:
    page = (ROOT / "docs" / "migration_mindspeed.md").read_text(encoding="utf-8")
    current = runpy.run_path(str(ROOT / "docs" / "migration_mindspeed.py"))["current"]
    assert current(page) == page
    stale = page.replace("| `cp_window_size` |", "| `window_size` |")
    assert current(stale) == page != stale
