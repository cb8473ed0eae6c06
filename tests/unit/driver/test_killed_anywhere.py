"""SIGKILL or SIGTERM to the driver before each thing that it does to the world: what does the next one find?

Whatever the driver was about to do, the next one goes on from the newest step that is in the log: keepers live on, or
have brought it to storage.
"""

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest

from raycp.driver import record
from raycp.driver.saving import Saving
from raycp.events import EventLog
from tests.unit.driver.fake_cluster import FakeCheckpoints, FakeCluster, FakeKeepers, FakeRanks, Fault
from tests.unit.driver.test_chains import Killed, come_again
from tests.unit.driver.test_controller import Run, check_complete, named

DOES = (
    (FakeKeepers, ("commit", "keep_only", "assign", "abandon", "persist")),
    (FakeCheckpoints, ("_store",)),
    (FakeRanks, ("gather",)),
    (EventLog, ("write",)),
    (record, ("write_json",)),
)
"""What a driver does that others see."""
NODES = dict.fromkeys("abcd", 2)
SCENES: dict[str, tuple[list[Fault], int, dict[str, Any]]] = {
    "a rank, copies late": ([Fault("step 5", 0, "die")], 1, {"checkpoint_every": 50}),
    "a node": ([Fault("step 4", 0, "node", rank=3)], 0, {"checkpoint_every": 3}),
    "a rank, then larger again": ([Fault("step 3", 0, "die")], 0, {"checkpoint_every": 2}),
    "a keeper, then a rank": (
        [Fault("step 3", 0, "keeper", rank=3), Fault("step 5", 0, "die")],
        1,
        {"checkpoint_every": 3},
    ),
    "two nodes": (
        [Fault("step 4", 0, "node", rank=3), Fault("step 4", 1, "node", rank=0)],
        0,
        {"checkpoint_every": 50, "cp": (4, 4)},
    ),
    "while it recovers": (
        [Fault("step 4", 0, "die"), Fault("restoring", 0, "die", rank=1), Fault("connecting", 2, "freeze")],
        1,
        {"checkpoint_every": 4},
    ),
    "a full peer, then a rank": ([Fault("step 3", 0, "full"), Fault("step 5", 0, "die")], 1, {"checkpoint_every": 4}),
}


class Limit:
    """The driver gets a signal before its `at`-th act."""

    def __init__(self, signal: str, at: int) -> None:
        self.signal, self.at, self.acts, self.act = signal, at, 0, ""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for owner, names in DOES:
            for name in names:
                self._wrap(patch, owner, name)
        if self.signal == "SIGKILL":
            patch.setattr(Saving, "last_words", lambda *_, **__: None)
            patch.setattr(Saving, "close", lambda saving: False)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def act(*arguments: Any, **options: Any) -> Any:
            self.acts += 1
            if self.acts == self.at:
                self.act = f"{name} {options.get('what', '')}".strip()
            if self.acts == self.at and self.signal == "SIGTERM":
                raise SystemExit(143)
            if self.acts >= self.at and self.signal == "SIGKILL":  # what its clean-up tries is not done either
                raise Killed
            return plain(*arguments, **options)

        patch.setattr(owner, name, act)


def ended_before(at: int, signal: str, scene: str, folder: Path) -> tuple[str, Run]:
    """Runs until then, and with another driver to the end; the act that was not done ("": it had ended by itself)."""
    faults, lag, how = SCENES[scene]
    cluster = FakeCluster(dict(NODES), list(faults))
    cluster.lag = lag
    run = Run(folder, cluster, **how)
    limit = Limit(signal, at)
    with pytest.MonkeyPatch.context() as patch:
        limit.install(patch)
        with contextlib.suppress(Killed, SystemExit):
            run()
    if not limit.act:
        return "", run
    come_again(cluster, NODES)
    cluster.faults = []
    again = Run(folder, cluster, **how)
    again.checkpoints.manifests = run.checkpoints.manifests
    again()
    return limit.act, again


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("scene", SCENES)
def test_a_driver_that_ends_before_any_of_its_acts_leaves_all_that_is_in_the_log(
    scene: str, signal: str, every: int, tmp_path: Path
) -> None:
    for at in itertools.count(1, every):
        folder = tmp_path / str(at)
        folder.mkdir()
        act, run = ended_before(at, signal, scene, folder)
        if not act:
            assert at > 40
            return
        check_complete(folder, run)
        lost = [e["steps_lost"] for e in named(folder, "recovered")]
        assert not any(lost), f"{signal} before act {at} ({act}): {lost} steps lost"
