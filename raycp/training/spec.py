"""Where a model comes from: a folder, a hub id, a GGUF file, or a configuration (random initialisation).

Guarantees: a ModelSpec is plain strings, so it travels to other machines and into JSON; nothing but safetensors and
GGUF is ever read, no code of a repository is run (`trust_remote_code` is off), and what cannot be used is refused by
name. transformers is imported when a configuration, tokenizer or file list is asked for, torch never.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raycp.errors import ModelError
from raycp.training.gguf_rope import with_rope_scaling

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Kind = Literal["folder", "hub", "gguf", "config"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model by reference. Make one with `ModelSpec.of`.

    Attributes:
        kind: what `source` is.
        source: absolute folder, hub id, or "" for a configuration.
        gguf_file: file name inside `source` when kind is "gguf".
        revision: branch, tag or commit of a hub id.
        config_json: the configuration as JSON when kind is "config" or "gguf" (reading a GGUF file's metadata takes
            seconds: it is done once, where the spec is made).
    """

    kind: Kind
    source: str
    gguf_file: str | None = None
    revision: str | None = None
    config_json: str | None = None

    @classmethod
    def of(cls, model: Any, revision: str | None = None) -> "ModelSpec":
        """From what a user gives as `model`.

        Args:
            model: a folder with config.json and safetensors; a folder with one .gguf file and no safetensors, or the
                path of a .gguf file (see `raycp.training.gguf_rope` on RoPE scaling); a hub id; a transformers
                configuration; a ModelSpec.
            revision: of a hub id.

        Raises:
            ModelError: no such folder, a folder whose weights are not safetensors or GGUF, or a GGUF file whose RoPE
                scaling cannot be told.
        """
        if isinstance(model, ModelSpec):
            return model
        if hasattr(model, "to_dict") and hasattr(model, "model_type"):
            return cls(kind="config", source="", config_json=_to_json(model))
        if not isinstance(model, str | os.PathLike):
            raise ModelError(
                f"model is a {type(model).__name__}",
                fix="give a folder, a hub id, a .gguf file or a transformers configuration",
            )
        path = Path(model).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return cls._of_gguf(path.absolute())
        if path.is_dir():
            return cls._of_folder(path.absolute())
        name = os.fspath(model)
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or path.suffix == ".gguf":
            raise ModelError(
                f"model={name!r}: no such file or folder on this machine",
                fix="give a folder that every node sees, or a hub id such as 'meta-llama/Llama-3.1-8B'",
            )
        return cls(kind="hub", source=name, revision=revision)

    @classmethod
    def _of_folder(cls, folder: Path) -> "ModelSpec":
        ggufs = sorted(p.name for p in folder.glob("*.gguf"))
        if any(folder.glob("*.safetensors")):
            if not (folder / "config.json").is_file():
                raise ModelError(f"{folder} has weights but no config.json", fix="add the model's config.json")
            return cls(kind="folder", source=str(folder))
        if len(ggufs) == 1:
            return cls._of_gguf(folder / ggufs[0])
        if ggufs:
            raise ModelError(
                f"{folder} has {len(ggufs)} GGUF files: {', '.join(ggufs)}", fix="give the path of one of them"
            )
        pickles = sorted(p.name for p in (*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")))
        if pickles:
            raise ModelError(
                f"{folder} has no safetensors, only {', '.join(pickles[:3])}, whose pickles can run code",
                fix="load the model once with transformers and save it with save_pretrained(safe_serialization=True)",
            )
        raise ModelError(
            f"{folder} has neither *.safetensors nor a *.gguf file",
            fix="give a folder with weights, or a transformers configuration for random initialisation",
        )

    @classmethod
    def _of_gguf(cls, file: Path) -> "ModelSpec":
        spec = cls(kind="gguf", source=str(file.parent), gguf_file=file.name)
        return replace(spec, config_json=_to_json(with_rope_scaling(spec.load_config(), file)))

    @property
    def is_random(self) -> bool:
        """Whether the weights are made from the seed instead of read."""
        return self.kind == "config"

    def load_config(self) -> "PretrainedConfig":
        """The transformers configuration.

        Raises:
            ModelError: it cannot be read, or its model type is not one of transformers' own.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        if self.config_json is not None:
            raw = json.loads(self.config_json)
            model_type = raw.pop("model_type", "")
            if model_type not in CONFIG_MAPPING:
                raise ModelError(f"unknown model type {model_type!r}", fix="use a configuration class of transformers")
            return CONFIG_MAPPING[model_type].from_dict(raw)
        try:
            return AutoConfig.from_pretrained(self.source, trust_remote_code=False, **self._where())
        except (OSError, ValueError, KeyError, ImportError, IndexError) as error:
            raise ModelError(
                f"no configuration can be read from {self.source!r}: {error}",
                fix="check the folder, or the hub id and the network; GGUF needs the package gguf; a model with code "
                "of its own is refused",
            ) from error

    def load_tokenizer(self, source: str | None = None) -> "PreTrainedTokenizerBase":
        """The tokenizer of `source` (a folder or hub id), by default the model's own.

        Raises:
            ModelError: there is none.
        """
        from transformers import AutoTokenizer

        if source is None and self.kind == "config":
            raise ModelError("a model given as a configuration has no tokenizer", fix="give tokenizer=")
        where = self._where() if source is None else {}
        try:
            return AutoTokenizer.from_pretrained(source or self.source, trust_remote_code=False, **where)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"no tokenizer can be read from {source or self.source!r}: {error}",
                fix="give tokenizer= a folder or hub id that has one",
            ) from error

    def weights_folder(self, *, on_piece: Callable[[], None] = lambda: None) -> Path:
        """Local folder of the weights; a hub id is downloaded to the cache of this machine first.

        Args:
            on_piece: called for whatever the download has brought.

        Raises:
            ModelError: the download fails, or the repository has no safetensors.
        """
        if self.kind != "hub":
            return Path(self.source)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
        from huggingface_hub.utils.tqdm import tqdm

        class Bar(tqdm):
            def update(self, n: float | None = 1) -> bool | None:
                on_piece()
                return super().update(n)  # type: ignore[no-any-return]

        patterns = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt"]
        try:
            folder = Path(
                snapshot_download(self.source, revision=self.revision, allow_patterns=patterns, tqdm_class=Bar)
            )
        except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ModelError(
                f"{self.source!r} cannot be downloaded: {error}",
                fix="check the id, the access rights and the network, or give a folder",
            ) from error
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"{self.source!r} has no safetensors", fix="use a revision that has, or convert it once")
        return folder

    def fingerprint(self) -> str:
        """Hex digest that changes when the model changes: configuration, and names and sizes of the weight files."""
        digest = hashlib.sha256(self.kind.encode())
        if self.kind == "config":
            digest.update((self.config_json or "").encode())
        elif self.kind == "hub":
            commit = getattr(self.load_config(), "_commit_hash", None)
            digest.update(f"{self.source}@{commit or self.revision}".encode())
        else:
            folder = Path(self.source)
            config = folder / "config.json"
            if config.is_file():  # a GGUF file may need it for its RoPE scaling
                digest.update(config.read_bytes())
            names = [self.gguf_file] if self.gguf_file else sorted(p.name for p in folder.glob("*.safetensors"))
            for name in names:
                digest.update(f"{name}:{(folder / name).stat().st_size};".encode())
        return digest.hexdigest()

    def to_dict(self) -> dict[str, str | None]:
        """Plain dict for JSON; `ModelSpec(**d)` is the way back."""
        return asdict(self)

    def describe(self) -> str:
        """One line for people."""
        if self.kind == "config":
            return f"{json.loads(self.config_json or '{}').get('model_type')} (random initialisation)"
        return f"{self.source}/{self.gguf_file}" if self.gguf_file else self.source

    def _where(self) -> dict[str, str]:
        if self.gguf_file:
            return {"gguf_file": self.gguf_file}
        return {"revision": self.revision} if self.revision else {}


def _to_json(config: Any) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)
