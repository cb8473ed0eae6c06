"""`raycp inspect`: what a run would see of its data, before any worker starts.

Guarantees: rows go through the same code as in `fit`, with the same settings; nothing is left behind unless `folder` is
given; no model weights are read. Cost: preparing the data, or the first `rows` of it.
"""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raycp.config import DataConfig, FitConfig
from raycp.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from data_pipeline import DocumentStore, Pack
    from data_pipeline.picture import Sawtooth


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Shows what a run would see of its data: format, lengths, packing, packed rows, and the split over ranks."""

    data: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders, patterns, URLs or names of data sets on the hub."""
    model: str
    """Model whose tokenizer and chat template are used: a folder or a hub id."""
    tokenizer: str | None = None
    """Another tokenizer: a folder or a hub id."""
    weights: tuple[float, ...] = ()
    """How often the rows of each item of `data` are seen in an epoch, in the same order."""
    seq_length: int = FitConfig.seq_length
    """Tokens of a pack."""
    seed: int = 0
    """Of the order of packs."""
    rows: int | None = None
    """Looks at the first rows only."""
    config: Annotated[DataConfig, tyro.conf.arg(name="data")] = field(default_factory=DataConfig)
    packs: tuple[int, ...] = (0,)
    """Numbers of the packs to show, in the order of training."""
    tokens: int = 160
    """Most tokens of a document to show in the terminal (ten times as many on the page)."""
    pad: bool = False
    """Shows packs filled up to `seq_length`."""
    cp: int = 4
    """Context-parallel ranks whose split is shown; 1: none."""
    layout: Literal["contiguous", "zigzag", "balanced"] = "balanced"
    """Which tokens a rank holds, see `raycp.ParallelConfig`."""
    html: Path | None = None
    """Also writes everything as a page."""
    folder: Path | None = None
    """Keeps the prepared documents here, where a second call finds them."""

    def run(self) -> int:
        """Prints the report; returns 0.

        Raises:
            ConfigError: options that do not fit together.
            DataError, ModelError: as `raycp.fit`.
        """
        problems = self._problems()
        problems += FitConfig(seq_length=self.seq_length, seed=self.seed, data=self.config).problems()
        if problems:
            raise ConfigError.from_problems(problems)
        from data_pipeline import PackLoader, describe
        from data_pipeline import show as views

        tokenizer = self._tokenizer()
        with self._folder() as folder:
            store = self._prepare(tokenizer, folder)
            loader = PackLoader(store, seq_length=self.seq_length, policy=self.config.packing, seed=self.seed)
            plan = loader.plan(0)
            report, histogram = describe(store, plan), views.histogram_of(store)
            chosen = [(index, *self._pack(loader.plan(0).pack(index), store)) for index in self.packs]
            colour = views.use_colour(sys.stdout)
            print(report)
            print(views.histogram_text(histogram))
            for index, pack, sawtooth in chosen:
                print(f"pack {index} of {len(plan):,}: {len(pack.doc_ends):,} documents, {len(pack):,} tokens")
                print(views.terminal(pack, sawtooth, tokenizer, limit=self.tokens, colour=colour))
            if self.html is not None:
                page = views.page(
                    report, histogram, plan, chosen, tokenizer, limit=10 * self.tokens, title=" ".join(self.data)
                )
                self.html.write_text(page, encoding="utf-8")
                print(f"page      {self.html.resolve()}")
        return 0

    def _problems(self) -> list[Problem]:
        counts = (("rows", self.rows, 1), ("tokens", self.tokens, 1), ("cp", self.cp, 1))
        found = [
            Problem(f"--{name} {value} is below {least}", f"give {least} or more")
            for name, value, least in counts
            if value is not None and value < least
        ]
        found += [Problem(f"--packs {pack} is negative", "count packs from 0") for pack in self.packs if pack < 0]
        for name, path in (("html", self.html and self.html.parent), ("folder", self.folder)):
            if path is not None:
                try:
                    path.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    found.append(Problem(f"--{name}: {error}", "name a place that can be written"))
        return found

    def _tokenizer(self) -> Any:
        from raycp.training.spec import ModelSpec

        folder = Path(self.model).expanduser()
        no_weights_needed = folder.is_dir() and not any(folder.glob("*.gguf"))
        spec = ModelSpec(kind="folder", source=str(folder)) if no_weights_needed else ModelSpec.of(self.model)
        return spec.load_tokenizer(self.tokenizer)

    def _pack(self, documents: tuple[int, ...], store: "DocumentStore") -> "tuple[Pack, Sawtooth | None]":
        from data_pipeline import pack_documents
        from data_pipeline.picture import Sawtooth
        from raycp.plan import AttentionPlan, RankGrid

        pack = pack_documents([store.document(d) for d in documents], self.seq_length if self.pad else None)
        if self.cp == 1:
            return pack, None
        plan = AttentionPlan.build(
            pack.doc_ends,
            RankGrid(dp=1, ring=self.cp),
            layout=self.layout,
            algorithm="ring",
            num_heads=1,
            num_kv_heads=1,
        )
        return pack, Sawtooth.of(pack.doc_ends, [plan.token_index(rank) for rank in range(self.cp)])

    def _prepare(self, tokenizer: Any, folder: Path) -> "DocumentStore":
        from data_pipeline.prepare import ProgressBar, prepare

        data = self._data()
        with ProgressBar("preparing data") as progress:
            return prepare(
                data if self.rows is None else self._first_rows(data, folder),
                tokenizer,
                seq_length=self.seq_length,
                config=self.config,
                folder=folder,
                progress=progress,
            )

    def _data(self) -> Any:
        if not self.data:
            raise DataError("no data was named", fix="give at least one file, folder, pattern, URL or hub name")
        if self.weights and len(self.weights) != len(self.data):
            raise DataError(
                f"{len(self.weights)} weights for {len(self.data)} sources", fix="give --weights one number for each"
            )
        if self.weights:
            return list(zip(self.data, self.weights, strict=True))
        return self.data[0] if len(self.data) == 1 else list(self.data)

    def _first_rows(self, data: Any, folder: Path) -> Any:
        """The first rows of each source, with its weight; what on_bad_row="skip" leaves out is printed."""
        from data_pipeline.sources import open_sources

        def bad(error: DataError) -> None:
            if self.config.on_bad_row == "raise":
                raise error
            print(f"left out  {error.message}")

        sources = open_sources(data, folder / "spool")
        return [
            ((dict(row.data) for row in itertools.islice(one.source.rows(bad), self.rows)), one.weight)
            for one in sources
        ]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.folder is not None:
            yield self.folder
            return
        with tempfile.TemporaryDirectory(prefix="raycp-inspect-") as name:
            yield Path(name)
