"""What preparing a large corpus costs: seconds, memory of each process, going on after a kill, and the second start.

A corpus of text rows is written to a temporary folder (2 GB; documents of 200 to 60 000 characters, and one of 360
000 words), prepared by Ray tasks over all cores, killed on the way (SIGKILL to every process), started again, and
found by a third call. Peak resident memory is sampled ten times a second over the driver and every process below it,
mapped files and shared memory included. The tokenizer splits at white space, several times as fast as byte-pair
encoding. All is deleted at the end. Then packs are read as ranks read them.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.report import Report, parser
from jobs.stdlib_rows import source_files

SEQ_LENGTH = 131_072
_KILL_AFTER = 3  # parts


def make_corpus(path: Path, size: int) -> None:
    """Writes `size` bytes of rows {"text": ...}: pieces of the standard library, each different."""
    words = " ".join(text for _, text in source_files()).split(" ")
    rng = np.random.default_rng(0)
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps({"text": " ".join((words * 4)[:1_000_000])}) + "\n")
        while written < size:
            start = int(rng.integers(len(words) - 12_000))
            text = f"{number} " + " ".join(words[start : start + int(np.exp(rng.uniform(3.6, 9.3)))])
            written += stream.write(json.dumps({"text": text}) + "\n")
            number += 1


def word_tokenizer() -> Any:
    """A fast tokenizer of the 4096 most frequent words: memory and files are measured here, not tokenizers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for _, text in source_files() for word in text.split())
    words = {word: i for i, word in enumerate(["<unk>", "<end>", *(w for w, _ in counts.most_common(4094))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")


def prepare_in_child(data: str, folder: str) -> None:
    """What the child process does: connects to a local Ray and prepares."""
    from data_pipeline.prepare import ProgressBar, prepare
    from raycp.config import DataConfig
    from raycp.driver.cluster import connect

    began = time.perf_counter()
    with ProgressBar("preparing data") as bar:
        store = prepare(
            data,
            word_tokenizer(),
            seq_length=SEQ_LENGTH,
            config=DataConfig(overflow="split"),
            folder=folder,
            progress=bar,
            connect=lambda: connect(workers=None),
        )
    print(json.dumps({"seconds": time.perf_counter() - began, "folder": str(store.folder)}), flush=True)


class Memory:
    """Samples the resident memory of a process and all below it."""

    def __init__(self, pid: int) -> None:
        self.peaks: dict[tuple[int, str], int] = {}
        self._root = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    key = (process.pid, process.name())
                    self.peaks[key] = max(self.peaks.get(key, 0), process.memory_info().rss)
            except psutil.NoSuchProcess:
                continue

    def end(self) -> None:
        """Stops sampling."""
        self._ended.set()
        self._thread.join()


def start(data: Path, folder: Path) -> subprocess.Popen[str]:
    """The child, in a process group of its own."""
    words = [sys.executable, "-m", "benchmarks.preparing", "--child", str(data), str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(child: subprocess.Popen[str]) -> dict[str, object]:
    """What the child printed.

    Raises:
        RuntimeError: it failed.
    """
    out, _ = child.communicate()
    if child.returncode:
        raise RuntimeError(f"preparing failed with code {child.returncode}")
    return dict(json.loads(out.splitlines()[-1]))


def kill_group(child: subprocess.Popen[str]) -> None:
    """SIGKILL to the child and every process that it started."""
    below = psutil.Process(child.pid).children(recursive=True)
    os.killpg(child.pid, signal.SIGKILL)
    for process in below:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    child.wait()


def run(report: Report, size: int, root: Path) -> None:
    """Corpus, kill, go on, find again, read."""
    from data_pipeline import DocumentStore, PackLoader

    data, folder = root / "corpus.jsonl", root / "stores"
    make_corpus(data, size)
    print(f"corpus: {data.stat().st_size / 1e9:.2f} GB")
    child = start(data, folder)
    while len(list(folder.glob("*/part-*"))) < _KILL_AFTER and child.poll() is None:
        time.sleep(0.1)
    kill_group(child)
    written = len(list(folder.glob("*/part-*")))
    began = time.perf_counter()
    child = start(data, folder)
    memory = Memory(child.pid)
    found = finish(child)
    memory.end()
    seconds = time.perf_counter() - began
    store = DocumentStore.open(str(found["folder"]))
    parts = len(list(store.folder.glob("part-*")))
    print(
        f"killed after {written} of {parts} parts; {len(store):,} documents, {store.num_tokens:,} tokens in all, "
        f"the longest document {store.report['longest']:,}"
    )
    report.at_most("going on: seconds for the parts that were missing", seconds, None, " s")
    rate = data.stat().st_size * (parts - written) / parts / 1e6 / seconds
    report.at_least("going on: text prepared per second, start included", rate, None, " MB/s")
    python = {key: peak for key, peak in memory.peaks.items() if "raylet" not in key[1] and "gcs" not in key[1]}
    report.at_most("peak resident memory of a process", max(python.values()) / 1e9, 1.5, " GB")
    began = time.perf_counter()
    finish(start(data, folder))
    report.at_most("a second start, imports included", time.perf_counter() - began, 15.0, " s")
    loader = PackLoader(store, seq_length=SEQ_LENGTH)
    rng = np.random.default_rng(1)
    times = []
    for pack_id in rng.integers(loader.packs_per_epoch, size=min(200, loader.packs_per_epoch)).tolist():
        began = time.perf_counter()
        loader.pack(pack_id)
        times.append(time.perf_counter() - began)
    report.at_most(f"reading a pack of {SEQ_LENGTH} tokens, median", float(np.median(times)) * 1e3, 10.0, " ms")


def main() -> int:
    """Command line."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--gigabytes", type=float, default=2.0)
    made.add_argument("--child", nargs=2, metavar=("DATA", "FOLDER"), help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child:
        prepare_in_child(*options.child)
        return 0
    report = Report()
    report.header("preparing")
    with tempfile.TemporaryDirectory(prefix="raycp-preparing-") as root:
        run(report, int((0.2 if options.quick else options.gigabytes) * 1e9), Path(root))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
