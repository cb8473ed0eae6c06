"""What is found out before a run writes or starts anything: `Setup.check` collects every problem into one report.

Guarantees: nothing is written and no actor is started here (an existing cluster is connected to, to see its size);
a problem that only one check found is raised as that check's own error, several as one `ConfigError`. Costs reading the
model's configuration, its tokenizer and the first bytes of the data files.
"""

import dataclasses
import glob
import os
from pathlib import Path, PurePath
from typing import Any

from data_pipeline.sources import open_source, paths_of
from raycp.config import FitConfig
from raycp.driver.cluster import (
    ClusterHandle,
    connect,
    live_nodes,
    resolve_output_dir,
    total_resources,
    will_use_existing_cluster,
)
from raycp.driver.record import folder_problems
from raycp.errors import ClusterError, ConfigError, DataError, ModelError, Problem, one_error
from raycp.resolve import capacity_problems, grid_problems, local_resources, resolve_workers
from raycp.training.check import check_model
from raycp.training.device import DeviceSpec, resolve_device
from raycp.training.spec import ModelSpec

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of a number in each compute dtype."""
_OWN_FILES = ("run.json", "config.json", "events.jsonl")


def check_kinds(config: FitConfig) -> None:
    """Raises:
    ConfigError: the configuration, or a part of it, is of another type (a dict, say), so that nothing can be checked.
    """
    parts = {
        f"config.{f.name}": f for f in dataclasses.fields(FitConfig) if dataclasses.is_dataclass(f.default_factory)
    }
    wanted: dict[str, Any] = {"config": FitConfig}
    found: dict[str, Any] = {"config": config}
    if isinstance(config, FitConfig):
        wanted |= {name: part.default_factory for name, part in parts.items()}
        found |= {name: getattr(config, part.name) for name, part in parts.items()}
    problems = [
        Problem(f"{name} is a {type(found[name]).__name__}", f"give a raycp.{kind.__name__}(...)")
        for name, kind in wanted.items()
        if not isinstance(found[name], kind)
    ]
    if problems:
        raise ConfigError.from_problems(problems)


@dataclasses.dataclass(kw_only=True)
class Setup:
    """What was found out before anything was written or started. `asked`: the configuration, "auto" not filled in."""

    asked: FitConfig
    config: FitConfig
    folder: Path
    model: ModelSpec
    model_config: Any
    tokenizer: Any
    device: DeviceSpec
    cluster: ClusterHandle | None

    @classmethod
    def check(cls, model: Any, data: Any, output_dir: Any, tokenizer: Any, config: FitConfig) -> "Setup":
        """Raises:
        ConfigError: listing every problem.
        """
        problems = config.problems()
        folder, found = resolve_output_dir(output_dir)
        problems += found if folder is None else folder_problems(folder)
        spec, model_config, loaded, found = _check_model_and_tokenizer(model, tokenizer, config)
        problems += found
        for name, source in (("data", data), ("eval_data", config.eval_data)):
            problems += _check_source(name, source, folder)
        cluster, device, resolved, found = _check_cluster(config)
        problems += found
        if device is not None and model_config is not None and not problems:
            problems += grid_problems(resolved, model_config, device=device.name, itemsize=ITEMSIZE[resolved.dtype])
        if problems or folder is None or spec is None or device is None:
            if cluster is not None:
                cluster.close()
            raise one_error(problems)
        return cls(
            asked=config,
            config=resolved,
            folder=folder,
            model=spec,
            model_config=model_config,
            tokenizer=loaded,
            device=device,
            cluster=cluster,
        )


def _check_model_and_tokenizer(
    model: Any, tokenizer: Any, config: FitConfig
) -> tuple[ModelSpec | None, Any, Any, list[Problem]]:
    problems: list[Problem] = []
    spec: ModelSpec | None = None
    model_config: Any = None
    loaded: Any = None
    try:
        spec = ModelSpec.of(model)
        model_config = spec.load_config()
        problems += check_model(model_config, 0, config.parallel)
    except ModelError as error:
        problems.append(Problem(error.message, error.fix, error))
    try:
        if tokenizer is not None and not isinstance(tokenizer, str | os.PathLike):
            if not hasattr(tokenizer, "save_pretrained"):
                raise ModelError(
                    f"tokenizer is a {type(tokenizer).__name__}",
                    fix="give a folder, a hub id or a transformers tokenizer",
                )
            loaded = tokenizer
        elif spec is not None:
            loaded = spec.load_tokenizer(None if tokenizer is None else os.fspath(tokenizer))
    except ModelError as error:
        problems.append(Problem(error.message, error.fix, error))
    if loaded is not None and model_config is not None and len(loaded) > model_config.vocab_size:
        problems.append(
            Problem(
                f"the tokenizer has {len(loaded)} tokens, the model a vocabulary of {model_config.vocab_size}",
                "give the model's own tokenizer, or a model whose embedding is large enough",
            )
        )
    return spec, model_config, loaded, problems


def _check_source(name: str, source: Any, folder: Path | None) -> list[Problem]:
    """Files must exist and hold something; what their rows are is judged when they are read."""
    if source is None and name == "data":
        return [Problem("data is None", "give a path, a datasets.Dataset, or rows")]
    found = []
    for path in paths_of(source):
        try:
            open_source(path, Path(os.devnull))
        except DataError as error:
            found.append(Problem(f"{name}: {error.message}", error.fix, error))
        if folder is not None and _would_read(path, folder):
            found.append(
                Problem(
                    f"{name}={path!r} also takes in what raycp writes to output_dir {folder}, so the data "
                    "would differ when the run continues",
                    "put output_dir elsewhere, or name the data files",
                )
            )
    return found


def _would_read(name: str, folder: Path) -> bool:
    """Whether a folder or pattern of data takes in files that a run writes to its output folder."""
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if path.is_dir():
        return path in (folder, *folder.parents)
    if not glob.has_magic(name):
        return False
    head, stars, tail = str(path).partition("**")
    if stars:
        inside = Path(head) in (folder, *folder.parents)
        return inside and any(PurePath(own).match(PurePath(tail).name or "*") for own in _OWN_FILES)
    return any((folder / own).match(str(path)) for own in _OWN_FILES)


def _check_cluster(config: FitConfig) -> tuple[ClusterHandle | None, DeviceSpec | None, FitConfig, list[Problem]]:
    """Looks at the cluster in use, or at this machine where a local Ray will be started; fills in what was on auto."""
    existing = will_use_existing_cluster()
    cluster: ClusterHandle | None = None
    try:
        if existing:
            cluster = connect(workers=None)
        resources = total_resources() if existing else local_resources()
        nodes = [(n.address, n.total) for n in live_nodes()] if existing else [("this machine", resources)]
        device = resolve_device(config.device, nodes, resource=config.resource)
    except ConfigError:  # no such device name: `config.problems()` lists it
        return cluster, None, config, []
    except ClusterError as error:
        return cluster, None, config, [Problem(error.message, error.fix, error)]
    found = capacity_problems(
        config.workers, existing_cluster=existing, resources=resources, resource=device.ray_resource
    )
    if found or config.problems():
        return cluster, device, config, found
    resolved = resolve_workers(config, resources=resources, resource=device.ray_resource)
    dtype = device.dtype if config.dtype == "auto" else config.dtype
    # what was on auto may break limits that the numbers given alone did not
    return cluster, device, dataclasses.replace(resolved, dtype=dtype, device=device.name), resolved.problems()
