"""One live driver per run, on any machine of the cluster: a named actor that dies with its driver.

Guarantees: while a driver of a run lives, no other driver of the same run on the same Ray cluster gets past `take`,
whichever host and file system it is on (the folder's file lock sees other processes of one host, and of a network
file system only where locks work there); Ray removes the name when the driver is gone, so a killed one blocks nobody
for longer than Ray needs to notice. It lies on the driver's node, so no other node's loss takes it. Costs one small
process without resources.
"""

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycp.errors import ConfigError

NAME = "driver"
WAIT_SECONDS = 20.0
"""How long a driver that was killed may keep its name; Ray notices its end within a second or two."""


class _Holder:
    """Says who holds the run."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def owner(self) -> str:
        return self._owner


class Lease:
    """The right to drive a run. Keep it as long as the run lives.

    Args:
        actor: that holds the name.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def take(cls, namespace: str, owner: str, *, wait: float = WAIT_SECONDS) -> "Lease":
        """Becomes the driver of the run of `namespace`.

        Args:
            namespace: of the run.
            owner: who this is, for the message that another one gets.
            wait: seconds to wait for the end of a driver that may be dying.

        Raises:
            ConfigError: another driver of the run is alive.
        """
        deadline = time.monotonic() + wait
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )  # lost with the driver
        remote = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=here)(_Holder)
        while True:
            try:
                actor = remote.options(name=NAME, namespace=namespace).remote(owner)
                ray.get(actor.owner.remote(), timeout=60.0)
                return cls(actor)
            except ValueError:  # the name is taken
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"another driver of this run is alive: {_owner(namespace)}",
                        fix="wait for it, stop it, or give another output_dir",
                    ) from None
            time.sleep(0.25)

    def give_back(self) -> None:
        """Lets another driver have the run."""
        ray.kill(self._actor, no_restart=True)


def _owner(namespace: str) -> str:
    try:
        return str(ray.get(ray.get_actor(NAME, namespace=namespace).owner.remote(), timeout=5.0))
    except (ValueError, ray.exceptions.RayError):
        return "unknown"
