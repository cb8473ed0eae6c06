"""The driver of a run that a tester hits: `python -m tests.elastic.scripted_driver SETTINGS`, once more to continue.

After each step it stands at a gate: it arms the next case when the run is complete again (workers, spares, keepers),
and says when a case is over. Nothing of the product is changed but the places that the tester looks at.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

import raycp
from raycp.driver import checkpoints, fleet, formation, keeper_calls, keepers
from raycp.training import committed
from tests.elastic.leftovers import of_this_process
from tests.elastic.script import Case, Script, put
from tests.elastic.victim_keeper import VictimKeeper
from tests.elastic.victims import VictimWorker, ranks_of

READY_SECONDS = 90.0
"""How long workers and keepers may take to be complete again."""
CHECKPOINT_EVERY = 5


class Gate:
    """Stands where the controller looks for capacity, after each step.

    Args:
        script: of the run.
        workers: how many ranks there have to be before a case is armed.
        spares: how many idle workers.
        total: steps of the run.
    """

    def __init__(self, script: Script, *, workers: int, spares: int, total: int) -> None:
        self.script = script
        self.workers, self.spares, self.total = workers, spares, total
        self.cases = script.cases()
        self.grow = formation.Formation.grow
        self.bigger = formation.Formation.bigger
        self.step = 0
        self.number = next((i for i in range(len(self.cases)) if script.said(f"settled-{i}") is None), len(self.cases))
        self.reform = False

    def after_step(self, world: formation.Formation) -> None:
        self.grow(world)
        log = world._events
        self.step = max(log.losses(), default=0)
        armed = self.script.said("armed")
        if armed is not None and armed["number"] == self.number:
            if not self._over(world, armed):
                return
            self.script.say(f"settled-{self.number}", step=self.step)
            if self.script.wait(f"restored-{self.number}", READY_SECONDS) is None:
                raise AssertionError(f"case {self.number} was not tidied up")
            self.number += 1
        if self.number < len(self.cases) and self._complete(world):
            self._arm(world, self.cases[self.number])

    def _over(self, world: formation.Formation, armed: dict[str, Any]) -> bool:
        """Whether all strikes have happened, and two steps were committed after them."""
        case = self.cases[self.number]
        deadline = time.monotonic() + READY_SECONDS
        while case.hire and not self.script.said(f"done-{self.number}-0") and time.monotonic() < deadline:
            self.grow(world)
            time.sleep(0.02)
        done = [self.script.said(f"done-{self.number}-{i}") for i in range(len(case.strikes))]
        if all(done):
            if any(s.fault == "node joins" for s in case.strikes) and not self._grown(world):
                return False
            after = [e for e in self._committed() if e["time"] > max(d["time"] for d in done if d)]
            return len(after) >= 2
        late = self.step > armed["step"] + 3 * CHECKPOINT_EVERY
        if late and case.eager:  # a world of one rank exchanges nothing
            for i in [i for i, mark in enumerate(done) if mark is None]:
                self.script.say(f"done-{self.number}-{i}", skipped=True)
        elif late:
            raise AssertionError(f"case {self.number} ({case.name}) never came to its place")
        return False

    def _grown(self, world: formation.Formation) -> bool:
        """Waits until a node that joined has a worker; whether the world has it already."""
        deadline = time.monotonic() + READY_SECONDS
        while world.world.grid.world_size <= self.workers:
            self.grow(world)
            if self.bigger(world) is not None:
                return False
            if time.monotonic() > deadline:
                raise AssertionError("a node joined, and no larger world came of it")
            time.sleep(0.05)
        return True

    def _committed(self) -> list[dict[str, Any]]:
        return [e for e in raycp.events.read_events(self.script.folder.parent / "events.jsonl") if e["event"] == "step"]

    def _complete(self, world: formation.Formation) -> bool:
        """Waits until the workers are there; whether they are all in use."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            self.grow(world)
            ready = world._fleet.workers
            if self.cases[self.number].eager and len(ready) > 1:
                return True
            if len(ready) >= self.workers + self.spares and not world._fleet.warming:
                return bool(world.world.grid.world_size == self.workers)  # else a node that joined is not yet lost
            if time.monotonic() > deadline:
                raise AssertionError(f"only {len(ready)} workers {READY_SECONDS:.0f} s after case {self.number - 1}")
            time.sleep(0.05)

    def _arm(self, world: formation.Formation, case: Case) -> None:
        step = self.step + 3
        if case.checkpoint:
            step = max(-(-step // CHECKPOINT_EVERY), 3) * CHECKPOINT_EVERY  # two are there already
        if case.last:
            step = self.total
        size = len(world.ranks.members)
        strikes = tuple(replace(s, rank=s.rank % size) for s in case.strikes)
        spares = [w.probe.pid for w in world._fleet.workers if w not in world._workers]
        self.script.say(
            "armed",
            number=self.number,
            case=asdict(replace(case, strikes=strikes)),
            step=step,
            ranks=ranks_of(world.ranks.members),
            spares=spares,
        )
        self.reform = case.reform

    def larger(self, world: formation.Formation) -> Any:
        if self.reform:
            self.reform = False
            return world.world
        return self.bigger(world)


def main(settings: dict[str, Any]) -> None:
    out = Path(settings["output_dir"])
    script = Script(out / "script")
    put(fleet, "TrainWorker", VictimWorker)
    put(keeper_calls, "Keeper", VictimKeeper)
    workers, spares, total = settings["workers"], settings["elastic"]["spares"], settings["steps"]
    gate = Gate(script, workers=workers, spares=spares, total=total)
    put(formation.Formation, "grow", lambda self: gate.after_step(self))
    put(formation.Formation, "bigger", lambda self: gate.larger(self))
    commit, keep = committed.commit, keepers.Keepers.commit

    def commit_on_storage(*args: Any, **kwargs: Any) -> Any:
        script.hit("manifest")
        return commit(*args, **kwargs)

    def commit_in_memory(self: keepers.Keepers, manifest: Any) -> None:
        script.hit("commit", step=manifest.step)
        keep(self, manifest)

    put(checkpoints, "commit", commit_on_storage)
    put(keepers.Keepers, "commit", commit_in_memory)
    ray.init(address=settings["address"], log_to_driver=False, logging_level="ERROR")
    before = of_this_process()
    result = raycp.fit(
        transformers_model(Path(settings["inputs"])),
        Path(settings["inputs"]) / "rows.jsonl",
        tokenizer=str(Path(settings["inputs"]) / "tokenizer"),
        output_dir=out,
        config=raycp.FitConfig(
            seq_length=256,
            steps=total,
            global_batch=2,
            workers=workers,
            device="cpu",
            parallel=raycp.ParallelConfig(cp=tuple(settings["cp"]), algorithm="ring"),
            optim=raycp.OptimConfig(lr=1e-3, schedule="constant", warmup=0.0),
            data=raycp.DataConfig(overflow="split"),
            elastic=raycp.ElasticConfig(
                **{"checkpoint_every": CHECKPOINT_EVERY, "wait_for_capacity": 60.0, "heartbeat_timeout": 3.0}
                | settings["elastic"]
            ),
        ),
    )
    script.say("driver-left", left=sorted(of_this_process() - before))
    print(result.status, result.steps)


def transformers_model(inputs: Path) -> Any:
    """The configuration of the model that the inputs are for."""
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(inputs / "model")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
