"""The Ray that raycp starts by itself: what it is told, where it listens."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from raycp.driver.cluster import HEALTH

ROOT = Path(__file__).resolve().parents[2]
START = """
import json
import psutil
from ray._private import state, worker
from raycp.driver.cluster import connect

handle = connect(workers=3)
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
listening = {c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
print(json.dumps({"settings": state.state.get_system_config(), "listening": sorted(listening)}))
handle.close()
"""


def start(environ: Mapping[str, str]) -> dict[str, Any]:
    """Starts one in a process of its own; its settings, and the addresses that any of its processes listens on."""
    plain = {n: v for n, v in os.environ.items() if not n.startswith("RAY_health_check") and n != "RAY_ADDRESS"}
    words = [sys.executable, "-c", START]
    done = subprocess.run(words, cwd=ROOT, env={**plain, **environ}, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_local_ray_has_a_health_check_of_its_own_and_listens_on_loopback_only() -> None:
    found = start({})
    assert {name: found["settings"].get(name) for name in HEALTH} == HEALTH
    assert set(found["listening"]) - {"::ffff:127.0.0.1"} == {"127.0.0.1"}


@pytest.mark.slow
def test_a_health_check_that_the_user_set_is_not_overruled() -> None:
    settings = start({"RAY_health_check_timeout_ms": "7000"})["settings"]
    assert settings.get("health_check_timeout_ms", 7000) == 7000
    assert settings["health_check_period_ms"] == HEALTH["health_check_period_ms"]
