"""Groups that an accelerator's library does not let go of: which are aborted, and what happens if they are not."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_every_group_of_a_process_is_found() -> None:
    code = (
        "import torch.distributed as dist\n"
        "from raycp.training.mesh import build_mesh, replicated\n"
        "from workers.process_groups import ProcessGroups, backends_of\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "other = dist.new_group([0])\n"
        "print(sorted(backends_of(ProcessGroups._all())))\n"
        "mesh = replicated(build_mesh(1, 'cpu'))\n"
        "print({g.group_name for g in mesh.get_all_groups()} <= {g.group_name for g in ProcessGroups._all()})\n"
    )
    done = run(code)
    assert done.stdout.splitlines() == ["['group 0', 'group 1']", "True"], done.stderr


def test_a_process_whose_groups_are_stuck_ends_itself_and_says_which() -> None:
    code = (
        "import time\n"
        "from raycp.training.abort import abort_all\n"
        "from workers.process_groups import end_process\n"
        "class Hangs:\n"
        "    def abort(self): time.sleep(60)\n"
        "found = abort_all({'group 0': Hangs()}, deadline=0.2)\n"
        "assert not found.clean\n"
        "end_process(found)\n"
    )
    done = run(code)
    assert done.returncode == -signal.SIGKILL
    assert "groups not aborted" in done.stderr
    assert "group 0" in done.stderr
