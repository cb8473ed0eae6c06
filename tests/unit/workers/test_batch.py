"""Which packs a replica runs, and what an empty micro-batch is."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline import DocumentStore, PackLoader, build_store, split_pack
from jobs.presets import make_tokenizer
from raycp.attention import Groups
from raycp.attention.communicator import LocalCommunicator
from raycp.config import DataConfig
from raycp.plan import RankGrid
from raycp.training.layers import AttentionLayers
from workers.batch import Batcher, MicroBatch


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> PackLoader:
    rows = [{"text": "word " * n} for n in (5, 90, 40, 3, 60, 20, 1)]
    store: DocumentStore = build_store(
        rows, make_tokenizer(), seq_length=128, config=DataConfig(), folder=tmp_path_factory.mktemp("data")
    )
    return PackLoader(store, seq_length=128)


def batcher(loader: PackLoader, *, dp: int, cp: int, rank: int, **changed: Any) -> Batcher:
    grid = RankGrid(dp=dp, ring=cp)
    known: dict[str, Any] = {"layout": "auto", "algorithm": "auto", "keep_attention": False}
    return Batcher(
        loader=loader,
        grid=grid,
        rank=rank,
        groups=Groups(grid, rank, LocalCommunicator()),
        layers=AttentionLayers(
            num_heads=4, num_kv_heads=2, kinds=("full_attention",), windows={"full_attention": None}
        ),
        device=torch.device("cpu"),
        on_layer=lambda *_: None,
        **{**known, **changed},
    )


def test_replicas_share_the_packs_of_a_step_and_run_equally_many_micro_batches(loader: PackLoader) -> None:
    packs = tuple(range(loader.packs_per_epoch))
    assert len(packs) >= 2
    for dp in (1, 2, 3, 5):
        parts = [batcher(loader, dp=dp, cp=1, rank=r).assigned(packs) for r in range(dp)]
        assert len({len(part) for part in parts}) == 1
        assert sorted(p for part in parts for p in part if p is not None) == list(packs)


def test_ranks_of_one_replica_run_the_same_packs(loader: PackLoader) -> None:
    packs = tuple(range(loader.packs_per_epoch))
    assert batcher(loader, dp=2, cp=2, rank=2).assigned(packs) == batcher(loader, dp=2, cp=2, rank=3).assigned(packs)


def test_an_empty_micro_batch_has_no_target(loader: PackLoader) -> None:
    empty, full = batcher(loader, dp=3, cp=1, rank=2).micro_batches([None, 0])
    assert empty.num_tokens == 1
    assert empty.num_targets == 0
    assert (empty.targets == -100).all()
    assert full.num_targets == loader.num_targets(0)


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_the_shards_of_a_pack_are_the_pack(loader: PackLoader, cp: int) -> None:
    pack = loader.pack(0)
    whole = rows_of([pack.position_ids], [pack.ids], [pack.targets])
    parts = [next(batcher(loader, dp=1, cp=cp, rank=r).micro_batches([0])) for r in range(cp)]
    assert fields(parts) == whole
    planted = [*parts[:-1], parts[0]]
    assert cp == 1 or fields(planted) != whole, "a shard taken twice would be seen"


def fields(parts: list[MicroBatch]) -> list[tuple[int, ...]]:
    return rows_of([p.position_ids for p in parts], [p.ids for p in parts], [p.targets for p in parts])


def rows_of(*columns: list[Any]) -> list[tuple[int, ...]]:
    """Sorted (position, id, target) rows."""
    return sorted(zip(*(np.concatenate([np.asarray(c) for c in column]).tolist() for column in columns), strict=True))


def test_the_time_that_a_step_waits_for_data_is_counted(loader: PackLoader) -> None:
    one = batcher(loader, dp=1, cp=1, rank=0)
    ids = list(range(loader.packs_per_epoch))
    batches = list(one.micro_batches(one.assigned(ids)))
    assert len(batches) == len(ids)
    assert 0 < one.waited < 60
    before = one.waited
    assert list(one.micro_batches([])) == []
    assert one.waited == before


def test_a_pack_is_cut_in_the_thread_that_works_ahead_not_in_the_step(
    loader: PackLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return split_pack(*arguments)

    monkeypatch.setattr("workers.batch.split_pack", noted)
    one = batcher(loader, dp=1, cp=2, rank=1)
    assert len(list(one.micro_batches([0, 1]))) == 2
    assert len(threads) == 2
    assert all(name.startswith("data-ahead") for name in threads)
