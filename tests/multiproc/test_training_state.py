"""State moves between world sizes bit for bit; a checkpoint exports to a folder that Hugging Face loads."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from raycp.attention import Groups, build_groups
from raycp.config import OptimConfig
from raycp.plan import RankGrid
from raycp.training.checkpoint import CheckpointReader, Manifest, commit, newest, step_folder, write_shard
from raycp.training.export import export_hf
from raycp.training.model import Trainee
from raycp.training.optim import build_optimizer, clip_by_global_norm, set_learning_rate
from raycp.training.sharding import named_weights
from raycp.training.spec import ModelSpec
from raycp.training.state import export_state, import_state, state_names
from raycp.training.storage import Storage
from tests.multiproc.launcher import RankError, run_ranks
from tests.multiproc.training_cases import (
    EMPTY,
    SEED,
    make_step,
    micro_batch_loss,
    plain_loss,
    plain_model,
    tiny_llama,
    total_weight,
    trainee_on,
    whole,
)

OPTIMIZERS = {
    "adamw": OptimConfig(lr=1e-2, weight_decay=0.1),
    "sgd": OptimConfig(name="sgd", lr=0.5),
    "momentum": OptimConfig(name="sgd", lr=0.5, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Steps of training on one grid, with a checkpoint before or after."""

    grid: RankGrid
    model: ModelSpec
    optimizer: str = "adamw"
    shard: str = "full"
    dtype: str = "float32"
    steps: tuple[int, ...] = ()
    load: str = ""
    save: str = ""


def run_job(rank: int, world_size: int, jobs: list[Job]) -> list[dict[str, Any]]:
    return [_run_one(rank, world_size, job) for job in jobs]


def _run_one(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    groups = build_groups(job.grid)
    trainee = trainee_on(job.grid, job.model, shard=job.shard, dtype=job.dtype, initialise=not job.load)
    optimizer = build_optimizer(trainee, OPTIMIZERS[job.optimizer])
    evaluate = partial(_evaluate, trainee, job.grid, groups)
    if job.load:
        evaluate()  # leaves the root's parameters gathered: they must not survive the import
        import_state(trainee, optimizer, CheckpointReader(Path(job.load)).read)
    losses = []
    for step in job.steps:
        packs = make_step(2 + step % 2)
        scale = 1.0 / total_weight(packs)
        mine = packs[rank // job.grid.cp :: job.grid.dp]
        optimizer.zero_grad()
        for pack in mine + [EMPTY] * (-(-len(packs) // job.grid.dp) - len(mine)):
            loss = micro_batch_loss(trainee, pack, job.grid, groups, scale)
            loss.backward()
            losses.append(loss.item())
        clip_by_global_norm(trainee, 1.0)
        set_learning_rate(optimizer, 0.01 * step)
        optimizer.step()
    evaluate()
    state = export_state(trainee, optimizer)
    result: dict[str, Any] = {
        "losses": losses,
        "whole": {n: whole(p) for n, p in named_weights(trainee)},
        "rows": sum(rows.numel() for _, rows in state.values()),
        "names": state_names(trainee, optimizer),
    }
    if job.save:
        result["record"] = write_shard(Path(job.save), rank, state, generation=world_size)
    return result


@torch.no_grad()
def _evaluate(trainee: Trainee, grid: RankGrid, groups: Groups) -> None:
    trainee.eval()
    micro_batch_loss(trainee, EMPTY, grid, groups, 1.0)
    trainee.train()


def commit_of(folder: Path, results: list[dict[str, Any]], job: int = 0) -> Path:
    manifest = Manifest(
        step=1,
        cursor={},
        plan_hash="",
        generation=len(results),
        run_id="test",
        grid={},
        shards=tuple(r[job]["record"] for r in results),  # type: ignore[call-overload]
    )
    return commit(folder, manifest)


def everything(folder: Path) -> dict[str, torch.Tensor]:
    reader = CheckpointReader(folder)
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_state_saved_at_two_ranks_loads_bit_equal_at_any_number(tmp_path: Path, optimizer: str) -> None:
    spec = ModelSpec.of(tiny_llama(tie_word_embeddings=True))
    first = step_folder(tmp_path, 1)
    two = run_ranks(
        run_job,
        2,
        [Job(grid=RankGrid(dp=2, ring=1), model=spec, optimizer=optimizer, steps=(1, 2), save=str(first))],
    )
    commit_of(first, two)
    want = everything(newest(tmp_path).path or Path())
    assert {n: tuple(t.shape) for n, t in want.items()} == two[0][0]["names"]
    kinds = {"adamw": {"param", "exp_avg", "exp_avg_sq", "optimizer"}, "sgd": {"param"}}
    assert {n.split("/")[0] for n in want} == kinds.get(optimizer, {"param", "momentum_buffer"})
    worlds = {1: ["full", "none"], 3: ["full", "none"]} if optimizer == "adamw" else {3: ["full"]}
    for world_size, shards in worlds.items():
        jobs = [
            Job(
                grid=RankGrid(dp=1, ring=world_size),
                model=spec,
                optimizer=optimizer,
                shard=shard,
                load=str(first),
                save=str(tmp_path / f"{world_size}-{shard}" / "step-00000001"),
            )
            for shard in shards
        ]
        results = run_ranks(run_job, world_size, jobs)
        for i, job in enumerate(jobs):
            got = everything(commit_of(Path(job.save), results, i))
            assert got.keys() == want.keys()
            assert all(torch.equal(got[n], want[n]) for n in want)
            assert sum(r[i]["rows"] for r in results) == sum(t.numel() for t in want.values())


def test_a_resumed_run_is_bit_equal_and_a_forgotten_moment_is_seen(tmp_path: Path) -> None:
    spec = ModelSpec.of(tiny_llama())
    grid = RankGrid(dp=1, ring=2)
    folder = step_folder(tmp_path, 2)
    straight, first = run_ranks(
        run_job,
        2,
        [
            Job(grid=grid, model=spec, steps=(1, 2, 3, 4)),
            Job(grid=grid, model=spec, steps=(1, 2), save=str(folder)),
        ],
    )[0]
    results = run_ranks(run_job, 2, [Job(grid=grid, model=spec, steps=(1, 2), save=str(folder))])
    commit_of(folder, results)
    rest, fault = run_ranks(
        run_job,
        2,
        [
            Job(grid=grid, model=spec, steps=(3, 4), load=str(folder)),
            Job(grid=grid, model=spec, optimizer="sgd", steps=(3, 4), load=str(folder)),
        ],
    )[0]
    assert first["losses"] + rest["losses"] == straight["losses"]
    assert all(torch.equal(rest["whole"][n], straight["whole"][n]) for n in straight["whole"])
    assert not all(torch.equal(fault["whole"][n], straight["whole"][n]) for n in straight["whole"])


def test_a_checkpoint_of_another_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    grid = RankGrid(dp=1, ring=1)
    folder = step_folder(tmp_path, 1)
    spec = ModelSpec.of(tiny_llama())
    results = run_ranks(run_job, 1, [Job(grid=grid, model=spec, optimizer="sgd", save=str(folder))])
    commit_of(folder, results)
    with pytest.raises(RankError, match="no tensor 'exp_avg"):
        run_ranks(run_job, 1, [Job(grid=grid, model=spec, optimizer="adamw", load=str(folder))])
    other = ModelSpec.of(tiny_llama(intermediate_size=51))
    with pytest.raises(RankError, match=r"CheckpointError: .*rows \[0, 51\)"):
        run_ranks(run_job, 1, [Job(grid=grid, model=other, optimizer="sgd", load=str(folder))])


@pytest.mark.parametrize("tied", [True, False])
def test_export_loads_in_hugging_face_with_equal_weights_and_logits(tmp_path: Path, tied: bool) -> None:
    config = tiny_llama(tie_word_embeddings=tied)
    spec = ModelSpec.of(config)
    folder = step_folder(tmp_path, 1)
    jobs = [Job(grid=RankGrid(dp=1, ring=2), model=spec, steps=(1, 2), save=str(folder))]
    results = run_ranks(run_job, 2, jobs)
    commit_of(folder, results)
    trained = results[0][0]["whole"]
    for name in ("export", ".export.old", ".export.writing"):  # files where folders belong are replaced as well
        (tmp_path / name).write_text("in the way")
    out = export_hf(CheckpointReader(folder), spec, None, tmp_path / "export", "float32", max_file_bytes=9_000)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["export", "latest.json", "step-00000001"]
    files = sorted(out.glob("model-*-of-*.safetensors"))
    assert len(files) > 2
    remote = Storage.of(f"memory://{tmp_path.name}").child(folder.name)
    for name in Storage.of(folder).names():
        remote.write(name, Storage.of(folder).blocks(name))
    twin = export_hf(CheckpointReader(remote), spec, None, tmp_path / "twin", "float32", max_file_bytes=9_000)
    assert [p.read_bytes() for p in files] == [(twin / p.name).read_bytes() for p in files]
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert all(torch.equal(p, trained[n]) for n, p in loaded.named_parameters())
    again = plain_model(config)
    with torch.no_grad():
        for n, p in again.named_parameters():
            p.copy_(trained[n])
        packs = make_step(2)
        assert plain_loss(loaded.double(), packs).item() == pytest.approx(plain_loss(again, packs).item(), rel=1e-9)
        assert plain_loss(plain_model(config), packs).item() != pytest.approx(plain_loss(again, packs).item(), rel=1e-3)
    half = export_hf(CheckpointReader(folder), ModelSpec.of(out), _tokenizer(), out, "bfloat16")
    reloaded = AutoModelForCausalLM.from_pretrained(half)
    assert reloaded.dtype == torch.bfloat16
    assert (half / "model.safetensors").is_file()
    assert (half / "tokenizer.json").is_file()
    assert all(torch.equal(p, trained[n].bfloat16()) for n, p in reloaded.named_parameters())


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(97)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_read_from_safetensors_whole_or_in_several_files(tmp_path: Path, tied: bool) -> None:
    lm = plain_model(tiny_llama(tie_word_embeddings=tied), seed=SEED + 1).float()
    lm.save_pretrained(tmp_path / "one")
    lm.save_pretrained(tmp_path / "many", max_shard_size=9_000)
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    jobs = [
        Job(grid=RankGrid(dp=1, ring=3), model=ModelSpec.of(tmp_path / "one")),
        Job(grid=RankGrid(dp=1, ring=3), model=ModelSpec.of(tmp_path / "many")),
        Job(grid=RankGrid(dp=1, ring=3), model=ModelSpec.of(tmp_path / "many"), shard="none"),
    ]
    for result in run_ranks(run_job, 3, jobs)[1]:
        assert set(result["whole"]) == {n for n, _ in lm.named_parameters()}
        assert all(torch.equal(result["whole"][n], p) for n, p in lm.named_parameters())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    plain_model(tiny_llama()).float().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.extra"] = torch.zeros(1)
    tensors["model.norm.weight"] = torch.zeros(5)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RankError) as caught:
        run_ranks(run_job, 1, [Job(grid=RankGrid(dp=1, ring=1), model=ModelSpec.of(tmp_path))])
    for text in ("missing lm_head.weight", "unexpected model.extra", "model.norm.weight has shape (5,)"):
        assert text in str(caught.value)


def test_bfloat16_computes_close_to_float32_with_fp32_masters() -> None:
    spec = ModelSpec.of(tiny_llama(tie_word_embeddings=True))
    grid = RankGrid(dp=1, ring=2)
    low, full = run_ranks(
        run_job,
        2,
        [Job(grid=grid, model=spec, dtype="bfloat16", steps=(1,)), Job(grid=grid, model=spec, steps=(1,))],
    )[0]
    assert all(t.dtype == torch.float32 for t in low["whole"].values())
    assert sum(low["losses"]) == pytest.approx(sum(full["losses"]), rel=3e-2)
    assert low["losses"] != full["losses"]
