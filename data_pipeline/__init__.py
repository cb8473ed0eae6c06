"""From rows to exact packed batches: sources, formats, rendering, packing, split per rank, cursor.

Guarantees: importing this package loads neither torch, ray, transformers nor datasets; names resolve on first use.

Modules, in the order that data takes:
    sources    files, folders, data sets and iterables -> rows with stable ids
    formats    row -> conversation, prompt + completion, or text
    encode     text -> token ids with character offsets; what is a special token and what only looks like one
    template   chat template: conversation -> text, and which characters are the assistant's
    render     loss mask and tokens -> documents
    document   Document, Pack: the value objects, and packing documents into one row
    overflow   what happens to a document that is longer than a pack
    store      memory-mapped documents, written once
    build      all of the above, cached: `prepare`
    packing    lengths -> which documents share a pack
    cursor     step -> packs; the position of a run, free of the world size; balance over replicas
    loader     pack id -> Pack, prefetched
    split      Pack -> the tokens of one context-parallel rank
    inspect    a short report for people
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data_pipeline.build import prepare as prepare
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
    "describe": "inspect",
    "pack_documents": "document",
    "plan_packs": "packing",
    "prepare": "build",
    "split_pack": "split",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'data_pipeline' has no attribute {name!r}")
    return getattr(import_module(f"data_pipeline.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
