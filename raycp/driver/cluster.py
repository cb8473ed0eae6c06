"""The Ray cluster that a run uses: connect or start, look at the nodes, find the output folder, ship our packages.

Guarantees: a running cluster is used when the caller is connected to one, is inside a Ray job, or RAY_ADDRESS is set;
otherwise a local Ray is started that listens on loopback only and ends with the run; `raycp`, `workers` and
`data_pipeline` of the driver are what every node imports, wherever the driver has them from. Costs 3-5 s for a local
start, under 1 s to connect.
"""

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import AuthenticationTokenLoader

from raycp.errors import ClusterError, Problem
from raycp.training.device import local_accelerators

PACKAGES = ("raycp", "workers", "data_pipeline")
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by `ray job submit` for its entry point
_LOOPBACK = "127.0.0.1"
_QUIET: Mapping[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
HEALTH: Mapping[str, int] = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 5,
}
"""Ray's health check where raycp starts it: a node that answers nothing for 20 s is lost (Ray's own settings: 64 s). A
loaded machine answers more often than that: all five questions in a row would have to wait 3 s each."""


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """One live node: total resources, and what of them is free now."""

    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ClusterHandle:
    """The cluster in use. `started_here`: this process started it and ends it."""

    started_here: bool
    in_job: bool
    driver_address: str
    environment_before: Mapping[str, str | None] = field(default_factory=dict)
    """Ray's authentication variables as they were before a local start; put back by `close`."""

    def close(self) -> None:
        """Ends the local Ray that `connect` started; leaves any other cluster, and the connection to it, alone."""
        if not self.started_here:
            return
        if ray.is_initialized():
            ray.shutdown()
        for name, value in self.environment_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self.environment_before:
            AuthenticationTokenLoader.instance().reset_cache()


def in_ray_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is the entry point of `ray job submit`, or a child of it."""
    return _JOB_VARIABLE in environ


def will_use_existing_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether `connect` will use a running cluster rather than start a local one."""
    return ray.is_initialized() or in_ray_job(environ) or environ.get("RAY_ADDRESS", "") not in ("", "local")


def connect(*, workers: int | None) -> ClusterHandle:
    """Connects to the running cluster, or starts a local one that is large enough for `workers` CPU ranks.

    Args:
        workers: ranks of the run; a local Ray offers at least so many CPUs, so that more ranks than cores can run.

    Raises:
        ClusterError: RAY_ADDRESS (or the job's cluster) does not answer, or is of Ray Client; no local Ray starts.
    """
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise _no_client("the connection in use")
        return ClusterHandle(started_here=False, in_job=in_ray_job(), driver_address=_driver_address())
    if will_use_existing_cluster():
        fix = "start one with `ray start --head`, or unset RAY_ADDRESS to let raycp start a local one"
        return _connect_to(os.environ.get("RAY_ADDRESS", "auto"), fix=fix)
    cpus = max(os.cpu_count() or 1, workers or 1)
    handle = ClusterHandle(
        started_here=True, in_job=False, driver_address=_LOOPBACK, environment_before=_token_in_memory()
    )
    try:
        with _loopback_allowed():
            ray.init(
                address="local",
                num_cpus=cpus,
                resources=_accelerators(),
                include_dashboard=False,
                _node_ip_address=_LOOPBACK,
                _system_config=_health_settings(),
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(_import_roots())}},
                **_QUIET,
            )
    except (OSError, RuntimeError, ValueError) as error:
        handle.close()
        raise ClusterError(
            f"no local Ray starts: {error}",
            fix="set RAY_TMPDIR to a short folder on a local disk with free space, such as /tmp, and try again",
        ) from error
    return handle


@contextlib.contextmanager
def running_cluster() -> Iterator[ClusterHandle]:
    """The cluster of RAY_ADDRESS, or else one on this machine; starts none. A connection that was made for the block
    ends with it.

    Raises:
        ClusterError: none answers, or it is of Ray Client.
    """
    if ray.is_initialized():
        yield connect(workers=None)
        return
    address = os.environ.get("RAY_ADDRESS") or "auto"
    handle = _connect_to(address, fix="set RAY_ADDRESS to the cluster's, or run this on one of its machines")
    try:
        yield handle
    finally:
        ray.shutdown()


def _connect_to(address: str, *, fix: str) -> ClusterHandle:
    if address.startswith("ray://"):
        raise _no_client(f"RAY_ADDRESS={address!r}")
    try:
        _knock(address)
        ray.init(address=address, runtime_env=_shipping_environment(), **_QUIET)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray cluster answers at {address!r}: {error}", fix=fix) from error
    return ClusterHandle(started_here=False, in_job=in_ray_job(), driver_address=_driver_address())


def _knock(address: str) -> None:
    """One TCP connection to the head: without it, Ray asks an address where nobody listens for minutes.

    Raises:
        OSError: nobody listens there, or there is no cluster to be found.
        ValueError: not an address.
    """
    host, _, port = str(services.canonicalize_bootstrap_address(address)).rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()


def _no_client(what: str) -> ClusterError:
    return ClusterError(
        f"{what} is of Ray Client, behind which the workers cannot reach this process",
        fix="run on a machine of the cluster: `ray job submit --working-dir . -- python ...`",
    )


def live_nodes() -> list[NodeInfo]:
    """Live nodes, ordered by (address, node id): the same order on every call while the set does not change."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    found = [
        NodeInfo(
            node_id=n["NodeID"],
            address=n["NodeManagerAddress"],
            total=dict(n["Resources"]),
            free=dict(free.get(n["NodeID"], {})),
        )
        for n in ray.nodes()
        if n["Alive"]
    ]
    return sorted(found, key=lambda n: (n.address, n.node_id))


def total_resources() -> dict[str, float]:
    """Sum of the resources of all live nodes."""
    total: dict[str, float] = {}
    for node in live_nodes():
        for name, amount in node.total.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def resolve_output_dir(
    output_dir: str | os.PathLike[str], environ: Mapping[str, str] = os.environ
) -> tuple[Path | None, list[Problem]]:
    """The absolute output folder, or the problem with it.

    A relative path inside a Ray job would lie in a working folder that changes with every edit of the code, so it is
    taken relative to RAYCP_HOME there, and refused without one.
    """
    if not isinstance(output_dir, str | os.PathLike) or not os.fspath(output_dir):
        return None, [
            Problem(f"output_dir={output_dir!r} is not a path", "give a folder on storage that all nodes share")
        ]
    path = Path(output_dir).expanduser()
    if path.is_absolute():
        return path, []
    home = environ.get("RAYCP_HOME")
    if home:
        return Path(home).expanduser().resolve() / path, []
    if in_ray_job(environ):
        return None, [
            Problem(
                f"output_dir={str(output_dir)!r} is relative, and inside a Ray job the working folder is a copy that "
                "changes with every edit and lives on one node",
                "give an absolute path on storage that all nodes share, or set RAYCP_HOME to such a folder",
            )
        ]
    return path.resolve(), []


def _accelerators() -> dict[str, float]:
    """What Ray may not find by itself: NPUs, where CANN's `acl` module is not there to count them."""
    npus = local_accelerators()["NPU"]
    return {"NPU": float(npus)} if npus else {}


def _health_settings(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """What of `HEALTH` the user has not set for Ray by a variable of its own, which `_system_config` would overrule."""
    return {name: value for name, value in HEALTH.items() if f"RAY_{name}" not in environ}


def _token_in_memory() -> dict[str, str | None]:
    """Gives the local Ray that is about to start a token of its own, where it would write one to the home folder.

    Ray 2.60 guards a local cluster by a token, and leaves a new one in ~/.ray/auth_token; a cluster started later on
    this machine would then ask for it. Returns the variables as they were.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    before = {name: os.environ.get(name) for name in names}
    if any(before.values()) or AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return {}
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    AuthenticationTokenLoader.instance().reset_cache()
    return before


@contextlib.contextmanager
def _loopback_allowed() -> Iterator[None]:
    """Lets `ray.init` take 127.0.0.1 as its node address, so that every port of the local cluster is on loopback.

    Ray replaces loopback by the machine's own address unless this switch of its own says that the cluster has one
    machine; the switch is an environment variable that is read once, at import, so it is turned here (ray 2.60).
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _driver_address() -> str:
    return str(ray.util.get_node_ip_address())


def _package_dirs() -> list[Path]:
    import data_pipeline
    import raycp
    import workers

    return [Path(next(iter(m.__path__))).resolve() for m in (raycp, workers, data_pipeline)]


def _import_roots() -> list[str]:
    """Folders that make our packages importable, then the driver's PYTHONPATH."""
    roots = list(dict.fromkeys(str(p.parent) for p in _package_dirs()))
    return roots + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in roots]


def _shipping_environment() -> dict[str, Any] | None:
    """Runtime environment that brings our packages to every node; None where the job's working folder has them.

    An installation in the interpreter's own site-packages counts as present on every node, as ray itself must be:
    `probe` compares sources before training and says where they differ.
    """
    dirs = _package_dirs()
    cwd = Path.cwd().resolve()
    if in_ray_job() and all(cwd in d.parents for d in dirs):
        return None
    if all("site-packages" in d.parts and Path(sys.prefix).resolve() in d.parents for d in dirs):
        return None
    return {"py_modules": [str(d) for d in dirs]}
