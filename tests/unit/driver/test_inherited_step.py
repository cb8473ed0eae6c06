"""A step in memory outlives the generation that made it: the next one may save it, the one before may not."""

from pathlib import Path

import pytest

from raycp.driver.checkpoints import Checkpoints
from raycp.errors import StaleGenerationError
from raycp.events import EventLog
from raycp.training.checkpoint import newest
from raycp.training.latest import fence
from tests.unit.training.places import place, save, write


@pytest.mark.parametrize("generation", [4, 5])
def test_a_step_of_before_a_recovery_is_saved_by_the_new_generation_only(tmp_path: Path, generation: int) -> None:
    root = place("path", tmp_path)
    save(root, 50, generation=4)
    manifest = write(root, 57, generation=4)
    events = EventLog(tmp_path / "events.jsonl", generation=generation)
    checkpoints = Checkpoints(root, keep=3, events=events, say=print)
    fence(root, "run", 5)
    if generation == 4:
        with pytest.raises(StaleGenerationError):
            checkpoints.commit(manifest, began=0.0, stall_seconds=0.0)
    else:
        checkpoints.commit(manifest, began=0.0, stall_seconds=0.0)
    found = newest(root).manifest
    assert found is not None
    assert found.step == (50 if generation == 4 else 57)
    events.close()
