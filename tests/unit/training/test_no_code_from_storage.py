"""Nothing that is read from storage runs: no pickle in the source, and bombs anywhere in a checkpoint stay cold."""

import ast
import contextlib
import json
import pickle
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raycp.errors import RaycpError
from raycp.training.checkpoint import CheckpointReader, commit, committed_run, newest, prune
from raycp.training.latest import LATEST
from tests.unit.test_house import SOURCES, loaded_by, name_of
from tests.unit.training.places import KINDS, overwrite, place, save

OURS = [p for p in SOURCES if name_of(p).split("/")[0] in ("raycp", "workers", "data_pipeline", "jobs")]
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "_pickle"}
DCP = "torch.distributed.checkpoint"


def unsafe_lines(text: str) -> list[str]:
    """Statements that could run code out of a file."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(text)) if is_unsafe(node)]


def is_unsafe(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return any(n.split(".")[0] in UNSAFE_MODULES or n.startswith(DCP) for n in names)
    if not isinstance(node, ast.Call):
        return False
    called, options = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
    return (
        called in ("eval", "exec")
        or (called == "torch.load" and options.get("weights_only") != "True")
        or options.get("allow_pickle", "False") != "False"
        or options.get("trust_remote_code", "False") != "False"
        or called in ("yaml.load", "yaml.unsafe_load", "runpy.run_path")
    )


def test_the_source_unpickles_nothing():
    found = {name_of(path): unsafe_lines(path.read_text(encoding="utf-8")) for path in OURS}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import a, cloudpickle.x",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed.checkpoint import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=safe)",
        "np.load(path, allow_pickle=True)",
        "model(trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_a_planted_line_is_seen(text):
    assert unsafe_lines(text)
    assert not unsafe_lines("torch.load(path, weights_only=True)\nnp.load(path)\nmodel.eval()")


class Bomb:
    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self):
        return (Path.touch, (self.flag,))


def bomb(flag: Path, form: str) -> bytes:
    if form == "pickle":
        return pickle.dumps(Bomb(flag))
    path = flag.with_name("bomb.pt")
    torch.save({"param/w": Bomb(flag)}, path)
    return path.read_bytes()


def read_everything(root) -> None:
    """Every way in which raycp looks at a checkpoint folder."""
    committed_run(root)
    found = newest(root)
    if found.storage is not None:
        reader = CheckpointReader(found.storage)
        for name in reader.names:
            reader.read(name)
    prune(root, keep=3)


@pytest.mark.parametrize("form", ["pickle", "torch"])
@pytest.mark.parametrize("target", ["shard", "shard of the right length and checksum", "manifest.json", LATEST])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_in_a_checkpoint_stays_cold(tmp_path, kind, target, form):
    root, flag = place(kind, tmp_path), tmp_path / "exploded"
    folder, manifest = save(root, 1, world_size=1)
    data = bomb(flag, form)
    if target == LATEST:
        root.write(LATEST, [data])
    elif target == "manifest.json":
        overwrite(folder, target, lambda _: data)
    else:
        overwrite(folder, manifest.shards[0].file, lambda _: data)
        if target != "shard":
            shard = replace(manifest.shards[0], bytes=len(data), crc32=zlib.crc32(data))
            folder.delete("manifest.json")
            commit(folder, replace(manifest, shards=(shard,)))
    with contextlib.suppress(RaycpError):
        read_everything(root)
    assert not flag.exists()


def test_the_bomb_does_explode_where_something_unpickles_it(tmp_path):
    """The planted fault."""
    for form in ("pickle", "torch"):
        flag = tmp_path / form
        data = bomb(flag, form)
        if form == "pickle":
            pickle.loads(data)
        else:
            torch.load(tmp_path / "bomb.pt", weights_only=False)
        assert flag.exists()


def test_a_manifest_that_names_files_elsewhere_reads_none(tmp_path):
    root = place("path", tmp_path)
    folder, manifest = save(root, 1, world_size=1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * manifest.shards[0].bytes)
    raw = json.loads(json.dumps(manifest.to_dict()))
    raw["shards"][0] |= {"file": "../../secret", "crc32": zlib.crc32(secret.read_bytes())}
    overwrite(folder, "manifest.json", lambda _: json.dumps(raw).encode())
    with pytest.raises(RaycpError, match="no file name"):
        CheckpointReader(folder)
    assert newest(root).manifest is None


def test_what_a_keeper_imports_is_light():
    modules = ("manifest", "storage", "remote", "latest", "committed")
    assert loaded_by("import " + ", ".join(f"raycp.training.{m}" for m in modules)) == []
    assert loaded_by("import raycp.training.checkpoint") == ["torch"]
