"""Training rows out of the Python standard library: text that is on every machine, as rows that `raycp.fit` takes.

Guarantees: the same interpreter gives the same rows in the same order; no answer appears twice, and what is held out is
chosen by a checksum of the object's name, so a held-out question never trains. Costs a second of parsing. Another
Python release has other docstrings, so figures made from these rows name the release.
"""

import ast
import importlib.util
import inspect
import textwrap
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Row = dict[str, list[dict[str, str]]]
"""One chat: `{"messages": [{"role": ..., "content": ...}, ...]}`."""

# fmt: off
DOCUMENTED = (
    "abc", "argparse", "base64", "bisect", "calendar", "collections", "configparser", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "glob", "heapq",
    "html", "inspect", "itertools", "json", "linecache", "logging", "math", "operator", "os.path", "pathlib",
    "pprint", "queue", "random", "re", "secrets", "shlex", "shutil", "statistics", "string", "struct", "subprocess",
    "tempfile", "textwrap", "threading", "time", "tokenize", "traceback", "urllib.parse", "uuid", "weakref",
)
# fmt: on
"""Modules whose docstrings become questions and answers: present in every build of CPython, harmless to import."""

HELD_OUT_SHARE = 8
"""One object in so many is held out."""

_ANSWER_CHARACTERS = (40, 700)


@dataclass(frozen=True, kw_only=True)
class ChatRows:
    """Chats from docstrings: `train` and `held_out` share no object and no answer."""

    train: list[Row]
    held_out: list[Row]


def chat(question: str, answer: str) -> Row:
    """A row of one question and one answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def docstring_chats(modules: tuple[str, ...] = DOCUMENTED) -> ChatRows:
    """Questions such as "What does `json.dumps` do?", each answered by the first paragraphs of the docstring."""
    rows = ChatRows(train=[], held_out=[])
    seen: set[str] = set()
    for name, question, answer in _questions(modules):
        if answer in seen:
            continue
        seen.add(answer)
        held_out = zlib.crc32(name.encode()) % HELD_OUT_SHARE == 0
        (rows.held_out if held_out else rows.train).append(chat(question, answer))
    return rows


def source_chats(count: int, max_bytes: int) -> list[Row]:
    """Whole source files as long answers: the `count` largest modules of at most `max_bytes` bytes, largest first.

    A token of source text is at least two bytes for any tokenizer trained on code or English, so `max_bytes = 1.75 *
    seq_length` keeps each document, with its question and the chat template around it, inside one pack in practice.
    """
    files = [(len(text.encode()), name, text) for name, text in source_files() if not name.startswith("_")]
    fitting = sorted((size, name, text) for size, name, text in files if size <= max_bytes)[::-1]
    return [chat(f"Show the source of the module `{name}`.", text) for _, name, text in fitting[:count]]


def source_files(packages: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
    """Yields (module name, source text) of the library's top-level modules, or of whole `packages`, by name."""
    root = Path(ast.__file__).parent
    if packages is None:
        paths = sorted(root.glob("*.py"))
    else:
        paths = [path for package in packages for path in sorted((root / package).rglob("*.py"))]
    for path in paths:
        if "test" in path.parts or "tests" in path.parts:
            continue
        yield ".".join(path.relative_to(root).with_suffix("").parts), path.read_text(encoding="utf-8", errors="replace")


def _questions(modules: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    """(qualified name, question, answer) of every public function and class with a docstring of its own."""
    low, high = _ANSWER_CHARACTERS
    for module in modules:
        for short, is_class, docstring in sorted(_documented(module)):
            answer = _first_paragraphs(docstring, high)
            if short.startswith("_") or len(answer) < low:
                continue
            name = f"{module}.{short}"
            yield name, f"What is `{name}`?" if is_class else f"What does `{name}` do?", answer


def _documented(module: str) -> Iterator[tuple[str, bool, str]]:
    """(name, is it a class, docstring) of what a module defines at its top level.

    Source files are parsed, not imported: other packages replace functions of imported modules, and rows would depend
    on who was imported first. Modules written in C have no source to parse and are imported.
    """
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, isinstance(node, ast.ClassDef), ast.get_docstring(node) or ""
    else:
        for name, thing in vars(importlib.import_module(module)).items():
            if inspect.isclass(thing) or inspect.isbuiltin(thing):
                yield name, inspect.isclass(thing), thing.__doc__ or ""


def _first_paragraphs(docstring: str, limit: int) -> str:
    """Whole paragraphs of a docstring up to `limit` characters; "" if the first one alone is longer."""
    kept = ""
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph
        if len(longer) > limit:
            break
        kept = longer
    return textwrap.dedent(kept).strip()
