"""The peer of `benchmarks.recovery`: Ray Train's `TorchTrainer` with the same tiny Llama, data parallel over gloo.

What a careful user writes by Ray's documentation: DDP, a checkpoint every so many steps from rank 0, and a resume from
the newest one that Ray Train gives. Each rank takes its share of the same number of tokens a step. Every rank appends a
line per step to its own file; a file named `stop` ends the run.
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.faults import Nodes, driver, read_lines, wait_for

EVERY = 20
"""Steps between checkpoints."""


def loop(settings: dict[str, Any]) -> None:
    """Runs on every rank."""
    import ray.train
    import ray.train.torch
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(LlamaForCausalLM(LlamaConfig(**settings["model"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    folder = Path(settings["folder"])
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    with (folder / f"steps-{rank}-{os.getpid()}.jsonl").open("a") as log:
        for step in range(done + 1, settings["steps"] + 1):
            began = time.perf_counter()
            generator = torch.Generator().manual_seed(step * 100 + rank)
            tokens = settings["tokens"] // world
            ids = torch.randint(settings["model"]["vocab_size"], (1, tokens), generator=generator)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            stop = torch.tensor(float((folder / "stop").exists()))
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            seconds = time.perf_counter() - began
            log.write(
                json.dumps({"time": time.time(), "step": step, "seconds": seconds, "world": world, "from": done}) + "\n"
            )
            log.flush()
            if step % settings["every"] == 0:
                with tempfile.TemporaryDirectory() as made:
                    if rank == 0:
                        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                        torch.save(state, Path(made) / "state.pt")
                    given = ray.train.Checkpoint.from_directory(made) if rank == 0 else None
                    ray.train.report({"step": step}, checkpoint=given)
            if stop:
                return


def run_peer(
    folder: Path, *, model: dict[str, Any], tokens: int, workers: Any, whole: bool, every: int = EVERY
) -> dict[str, Any]:
    """Ray Train on two nodes of two CPUs, through a SIGKILL of rank 2, or of all processes of the node of rank 3.

    Args:
        folder: of the run.
        model: arguments of `LlamaConfig`.
        tokens: of a step, over all ranks.
        workers: `ScalingConfig.num_workers`; a list is a range.
        whole: the node is killed.
        every: steps between checkpoints.
    """
    folder.mkdir(parents=True)
    settings = folder / "settings.json"
    plain = {"folder": str(folder), "model": model, "tokens": tokens, "steps": 1000, "every": every, "workers": workers}
    settings.write_text(json.dumps(plain))
    log = folder / "driver.log"

    def lines() -> list[dict[str, Any]]:
        found = [line for path in folder.glob("steps-0-*.jsonl") for line in read_lines(path)]
        return sorted(found, key=lambda line: line["time"])

    with Nodes([2, 2]) as nodes, driver("benchmarks.ray_train", [str(settings)], address=nodes.address, log=log) as p:
        target = every * 3 // 2
        wait_for(lambda: len(lines()) >= target, p, seconds=150, what=f"step {target}", log=log)
        before = lines()
        pid = int((folder / f"pid-{3 if whole else 2}").read_text())
        hit = nodes.processes(nodes.node_of(pid)) if whole else [psutil.Process(pid)]
        fault = nodes.signal(hit, signal.SIGKILL)
        at = max(line["step"] for line in lines())
        wait_for(
            lambda: any(line["time"] > fault + 1 and line["step"] > at for line in lines()),
            p,
            seconds=200,
            what="back where it was",
            log=log,
        )
        (folder / "stop").touch()
        found = lines()
        with_new = [line for line in found if line["from"] > 0 or line["time"] > fault + 1]
        first = next(line for line in with_new if line["time"] > fault)
        back = next(line for line in with_new if line["step"] > at)
        p.wait(60)
    return {
        "step": median(line["seconds"] for line in before[1:]),
        "next_step": first["time"] - fault,
        "back": back["time"] - fault,
        "lost": at - first["from"],
        "world": first["world"],
    }


def main() -> int:
    """Runs the trainer on the cluster of RAY_ADDRESS; the one argument is a file of settings."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    settings = json.loads(Path(sys.argv[1]).read_text())
    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR")
    workers = settings["workers"]
    TorchTrainer(
        loop,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=tuple(workers) if isinstance(workers, list) else workers),
        run_config=RunConfig(
            name="peer", storage_path=settings["folder"], failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    return 0


if __name__ == "__main__":
    sys.exit(main())
