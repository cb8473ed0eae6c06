"""What every node and worker process says about itself before anything is built.

Guarantees: a node that would import other packages than the driver's, does not see the output folder, or sees another
model is named before the first collective, with what to change; all such findings come in one error.
Costs one short task per node and one call per worker.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycp.driver.cluster import PACKAGES, NodeInfo
from raycp.errors import ClusterError, Problem


def check_packages(nodes: Sequence[NodeInfo], *, timeout: float = 120.0) -> None:
    """Compares the sources of our packages on each node with the driver's.

    Raises:
        ClusterError: a node cannot import one of them, or imports another version, or a user's own folder of the
            same name shadows one; the message names node, package and path.
    """
    look = _package_reader()
    mine = look(PACKAGES)
    remote = ray.remote(num_cpus=0, max_retries=0)(look)
    calls = [
        remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(n.node_id, soft=False)).remote(PACKAGES)
        for n in nodes
    ]
    problems: list[Problem] = []
    for node, call in zip(nodes, calls, strict=True):
        try:
            theirs = ray.get(call, timeout=timeout)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                f"node {node.address} ({node.node_id[:8]}) did not run a first task: {error}",
                fix="look at the node with `ray status`; its Python environment must have ray and torch",
                node=node.address,
            ) from error
        for name in PACKAGES:
            problem = compare(node, name, mine[name], theirs[name])
            if problem is not None:
                problems.append(problem)
    raise_if_any(problems)


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Raises:
    ClusterError: listing all `problems`, if there is one.
    """
    if not problems:
        return
    lines = [f"{len(problems)} problem(s) on the nodes of this cluster:"]
    lines += [f"  {i}. {p.message}\n     fix: {p.fix}" for i, p in enumerate(problems, 1)]
    raise ClusterError("\n".join(lines), problems=[(p.message, p.fix) for p in problems])


def compare(node: NodeInfo, name: str, mine: tuple[str, str], theirs: tuple[str, str]) -> Problem | None:
    """What is wrong with a node's package: (path, digest) of the driver's against the node's; "" for none there."""
    if theirs[1] == mine[1]:
        return None
    where = f"node {node.address} ({node.node_id[:8]})"
    if not theirs[1]:
        return Problem(
            f"{where} cannot import package {name!r}: {theirs[0]}",
            "install raycp on every node, or submit with `ray job submit --working-dir` of a folder that has it",
        )
    if not (Path(theirs[0]) / "process_groups.py").exists() and name == "workers":
        hint = f"a folder named {name!r} in the job's working directory shadows raycp's: rename it"
    else:
        hint = "install the same version of raycp on every node"
    return Problem(f"{where} imports {name!r} from {theirs[0]}, which differs from the driver's {mine[0]}", hint)


def _package_reader() -> Any:
    """A function that travels by value (it is nested), so that it runs where our packages are missing."""

    def read(names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
        import hashlib
        import importlib.util
        from pathlib import Path as _Path

        found: dict[str, tuple[str, str]] = {}
        for name in names:
            spec = importlib.util.find_spec(name)
            where = list(spec.submodule_search_locations or []) if spec is not None else []
            if not where:
                found[name] = ("no such package on its path", "")
                continue
            root = _Path(where[0])
            digest = hashlib.sha256()
            for file in sorted(root.rglob("*.py")):
                digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
            found[name] = (str(root), digest.hexdigest())
        return found

    return read
