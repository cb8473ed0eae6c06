"""What a run leaves in its folder so that another driver can continue it: run.json, config.json, the lock.

Guarantees: one live driver per folder (a file lock, which the kernel drops when the process dies); the generation
rises with every driver start and is on disk before the first worker hears of it; a start that would change what the
run computes (model, data, optimizer, lengths, seed) is refused with both values; files are replaced by rename, so a
crash leaves the old or the new one. What may change between starts: workers, parallelism, device, elastic settings.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raycp.config import FitConfig
from raycp.errors import CheckpointError, ClusterError, ConfigError, Problem, StaleGenerationError
from raycp.events import read_events
from raycp.training.checkpoint import committed_run
from raycp.training.storage import Storage
from workers.storage import storage_fix

VERSION = 1
AWAY_SECONDS = 10.0
"""How long run.json may be out of sight (a mount that is away for a moment) before that is an error."""


class RunRecord:
    """The run.json of one folder, open for this driver.

    Args:
        folder: absolute output folder, made already.
        checkpoints: where the run's checkpoints are; default: in the folder.
    """

    def __init__(self, folder: Path, checkpoints: Storage | None = None) -> None:
        self.folder = folder
        self._checkpoints = checkpoints or Storage.of(folder / "checkpoints")
        self._data: dict[str, Any] = {}

    @property
    def run_id(self) -> str:
        return str(self._data["run_id"])

    @property
    def namespace(self) -> str:
        """Ray namespace of the run's detached actors."""
        return str(self._data["namespace"])

    @property
    def generation(self) -> int:
        return int(self._data["generation"])

    @property
    def status(self) -> str:
        return str(self._data["status"])

    @property
    def is_new(self) -> bool:
        """Whether no driver before this one has opened the run."""
        return self.generation == 1

    def open(self, identity: Mapping[str, Any], *, resume: str) -> None:
        """Starts a new run in the folder, or continues the one that is there, and raises the generation.

        Args:
            identity: what the run computes, as flat JSON values (see `identity_of`).
            resume: `ElasticConfig.resume`.

        Raises:
            ConfigError: `resume` forbids what would have to be done.
            CheckpointError: run.json is damaged, or belongs to a run that computes something else; events or
                checkpoints in the folder are of another run.
        """
        old = self._read()
        _refuse_foreign(self.folder, self._checkpoints, None if old is None else str(old["run_id"]))
        if old is None and resume == "must":
            raise ConfigError(
                f"elastic.resume='must', but {self.folder} holds no run", fix="check output_dir, or use resume='auto'"
            )
        if old is not None and resume == "never":
            raise ConfigError(
                f"elastic.resume='never', but {self.folder} holds run {old['run_id']} ({old['status']})",
                fix="give another output_dir, or use resume='auto' to continue",
            )
        if old is None:
            run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
            self._data = {"version": VERSION, "run_id": run_id, "namespace": f"raycp-{run_id}", "generation": 0}
            self._data["identity"] = dict(identity)
        else:
            _compare_identity(old["identity"], identity, self.folder)
            self._data = old
        self._write(
            generation=int(self._data["generation"]) + 1,
            status=self._data.get("status", "running"),
            driver={"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()},
        )

    def raise_generation(self) -> int:
        """Counts the generation up, on disk before this returns, and gives it.

        Raises:
            StaleGenerationError: another driver has taken the run over.
        """
        self.check_current()
        self._write(generation=self.generation + 1)
        return self.generation

    def check_current(self) -> None:
        """Raises:
        StaleGenerationError: the folder's record is of a newer generation than this driver's, or of another run:
            somebody else continues the run, and this driver must not write.
        ClusterError: there is none, or it cannot be read, for `AWAY_SECONDS`: nobody knows who has the run.
        """
        found = self._look()
        there = str(found["run_id"]), int(found["generation"])
        if there != (self.run_id, self.generation):
            raise StaleGenerationError(
                f"this driver has run {self.run_id} in generation {self.generation}, and run.json says {there[0]} in "
                f"generation {there[1]}: another driver has taken the run over",
                fix="let that one continue; end this one",
            )

    def remember(self, name: str, value: Any) -> Any:
        """What the run's first driver wrote under `name`; `value`, written now, if nobody did."""
        if name not in self._data:
            self.check_current()
            self._write(**{name: value})
        return self._data[name]

    def recall(self, name: str) -> Any:
        """What was written under `name`; None if nothing was."""
        return self._data.get(name)

    def peek(self, name: str) -> str | None:
        """A value of the run in the folder ("status", "namespace"), or None if there is none; changes nothing."""
        old = self._read()
        return None if old is None else str(old[name])

    def set_status(self, status: str, **fields: Any) -> None:
        """Records "running", "stopped", "failed" or "finished".

        Raises:
            StaleGenerationError: another driver has taken the run over.
        """
        self.check_current()
        self._write(status=status, **fields)

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / "run.json"
        if not path.exists():
            return None
        try:
            data = json.loads(path.read_text())
            if data["version"] != VERSION:
                raise CheckpointError(
                    f"{path} has version {data['version']}, this raycp reads {VERSION}",
                    fix="continue with the raycp that wrote it, or give another output_dir",
                )
            return dict(data)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {error!r}", fix="restore the file, or give another output_dir"
            ) from error

    def _look(self) -> dict[str, Any]:
        """The record, which this driver has written before."""
        deadline = time.monotonic() + AWAY_SECONDS
        while True:
            problem = "is missing"
            try:
                found = self._read()
                if found is not None:
                    return found
            except OSError as error:
                problem = f"cannot be read: {error}"
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"{self.folder / 'run.json'} {problem}: without it nobody knows which driver has the run",
                    fix="look at the mount of output_dir, put the file back, and give the same command again",
                )
            time.sleep(AWAY_SECONDS / 20)

    def _write(self, **fields: Any) -> None:
        """Changes values on disk, and here if that succeeds: what nobody else can see did not happen."""
        data = self._data | fields
        write_json(self.folder / "run.json", data)
        self._data = data


def identity_of(
    config: FitConfig, *, model: str, data: str, evaluation: str | None, plan: str, total_steps: int, dtype: str
) -> dict[str, Any]:
    """What the run computes, as flat {name: value}: everything that must be equal when a run is continued."""
    tree = config.to_dict()
    flat: dict[str, Any] = {
        "model": model,
        "data": data,
        "eval_data": evaluation,
        "pack_plan": plan,
        "total_steps": total_steps,
        "dtype": dtype,
    }
    flat |= {name: tree[name] for name in ("seq_length", "global_batch", "seed")}
    for part in ("data", "optim"):
        flat |= {f"{part}.{name}": value for name, value in tree[part].items() if name != "local_copy"}
    return dict(json.loads(json.dumps(flat)))


@contextlib.contextmanager
def single_driver(folder: Path) -> Iterator[None]:
    """Holds the folder's lock while this driver lives.

    Raises:
        ConfigError: another live driver holds it.
    """
    path = folder / "run.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(handle, 200, 0).decode(errors="replace") or "unknown"
            raise ConfigError(
                f"another driver of the run in {folder} is alive: {owner}",
                fix="wait for it, stop it, or give another output_dir",
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"host {socket.gethostname()}, pid {os.getpid()}".encode(), 0)
        yield
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Replaces a JSON file by rename, on disk (fsync) when this returns."""
    aside = path.with_name(f"{path.name}.tmp")  # one driver at a time writes here
    with aside.open("w") as file:
        json.dump(value, file, indent=2, sort_keys=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def folder_problems(folder: Path) -> list[Problem]:
    """Why `folder` cannot become the output folder, as far as can be seen without making it."""
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    if not existing.is_dir():
        return [Problem(f"output_dir {folder}: {existing} is a file", "give a folder, or a path where none is yet")]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [
            Problem(
                f"output_dir {folder}: {existing} cannot be written by this user",
                "grant write permission there, or give an output_dir that can be written",
            )
        ]
    return []


@contextlib.contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turns what the output folder's file system refuses into an error with a fix.

    Raises:
        ClusterError: no space, no permission, a file in the way, a mount that went away.
    """
    try:
        yield
    except OSError as error:
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        if not storage_fix(error) and (named is None or folder not in (named, *named.parents)):
            raise
        raise ClusterError(
            f"output_dir {folder} cannot be written: {error}",
            fix=storage_fix(error) or "give an output_dir on storage that can be written",
        ) from error


def _refuse_foreign(folder: Path, checkpoints: Storage, run_id: str | None) -> None:
    """Events and checkpoints of another run would be taken for this one's: its losses reported, its state loaded."""
    try:
        started = [str(e["run_id"]) for e in read_events(folder / "events.jsonl") if e["event"] == "run_started"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'events.jsonl'} is damaged: {error!r}",
            fix="repair or remove the line, or give another output_dir",
        ) from error
    found = {"events.jsonl": started[0] if started else None, "checkpoints": committed_run(checkpoints)}
    foreign = {name: other for name, other in found.items() if other is not None and other != run_id}
    if foreign:
        raise CheckpointError(
            f"{folder} holds {' and '.join(f'{name} of run {other}' for name, other in foreign.items())}, but "
            + ("no run.json" if run_id is None else f"run.json says {run_id}"),
            fix=f"move {' and '.join(foreign)} out of the folder, give another output_dir, or put the run.json back",
        )


def _compare_identity(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if not changed:
        return
    lines = [f"{folder} holds a run that computes something else; {len(changed)} value(s) differ:"]
    lines += [f"  {name}: {old.get(name)!r} there, {new.get(name)!r} now" for name in changed]
    raise CheckpointError(
        "\n".join(lines),
        fix="give the old values to continue that run, or another output_dir to start a new one",
        changed={name: (old.get(name), new.get(name)) for name in changed},
    )
