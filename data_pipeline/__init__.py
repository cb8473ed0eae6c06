"""From rows to exact packed batches: sources, formats, rendering, packing, split per rank, cursor.

Guarantees: importing this package loads neither torch, ray, transformers nor datasets; names resolve on first use.

Modules, in the order that data takes:
    files            files, folders, globs and URLs; compression
    rows             Row, Part; decoding that says where something is wrong
    text_rows, json_rows, table_rows, megatron_files, megatron_rows    rows of each kind of file
    readers          all of them; a file's fingerprint and parts
    spools           data sets and iterables, written aside so that they can be read in parts
    sources          files, hub names, data sets and iterables -> rows with stable ids; several with weights
    examples, formats, chat_formats, token_formats    row -> conversation, prompt + completion, text or token ids
    tool_text        tools as plain words, for templates that do not know them
    encode           text -> token ids with character offsets; what is a special token and what only looks like one
    template         chat template: conversation -> text, and which characters are the assistant's
    render           loss mask and tokens -> documents
    document         Document, Pack: the value objects, and packing documents into one row
    overflow         what happens to a document that is longer than a pack
    store, store_writer, local_copy    memory-mapped documents: read, written in parts, copied to a node's own disk
    part_worker, part_progress    all of the above for one part of a source; how far it is
    build            all parts, cached: `build_store`
    prepare          the same over a Ray cluster, with a progress bar; the only module here that imports ray
    packing, streams    lengths -> which documents share a pack, planned as a whole or as they come
    cursor           step -> packs; the position of a run, free of the world size; balance over replicas
    loader           pack id -> Pack
    split            Pack -> the tokens of one context-parallel rank
    inspect, show, picture    what was found, for people: numbers, text and HTML, the sawtooth
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.build import build_store as build_store
    from data_pipeline.cursor import Cursor as Cursor
    from data_pipeline.cursor import StepSchedule as StepSchedule
    from data_pipeline.cursor import assign_packs as assign_packs
    from data_pipeline.cursor import attention_cost as attention_cost
    from data_pipeline.document import Document as Document
    from data_pipeline.document import Pack as Pack
    from data_pipeline.document import pack_documents as pack_documents
    from data_pipeline.inspect import describe as describe
    from data_pipeline.loader import PackLoader as PackLoader
    from data_pipeline.packing import PackPlan as PackPlan
    from data_pipeline.packing import plan_packs as plan_packs
    from data_pipeline.split import PackShard as PackShard
    from data_pipeline.split import split_pack as split_pack
    from data_pipeline.store import DocumentStore as DocumentStore

_HOMES = {
    "Cursor": "cursor",
    "Document": "document",
    "DocumentStore": "store",
    "Pack": "document",
    "PackLoader": "loader",
    "PackPlan": "packing",
    "PackShard": "split",
    "StepSchedule": "cursor",
    "assign_packs": "cursor",
    "attention_cost": "cursor",
    "build_store": "build",
    "describe": "inspect",
    "pack_documents": "document",
    "plan_packs": "packing",
    "split_pack": "split",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'data_pipeline' has no attribute {name!r}")
    return getattr(import_module(f"data_pipeline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
