import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from data_pipeline import Document, build_store, pack_documents, plan_packs
from data_pipeline.inspect import Histogram, describe, percentiles
from data_pipeline.picture import Sawtooth, cells, rank_colour, svg, text
from data_pipeline.show import MASKED, PAD, TRAINED, documents_of, histogram_text, page, terminal, use_colour
from raycp.config import DataConfig
from raycp.plan import AttentionPlan, RankGrid

from .tiny_tokenizers import chat, make_tokenizer

CHATS = [{"messages": chat("hello " * i, "caf\u00e9 fine " * i)} for i in range(1, 9)]


def sawtooth(doc_ends, cp=2, layout="zigzag") -> Sawtooth:
    plan = AttentionPlan.build(
        doc_ends, RankGrid(dp=1, ring=cp), layout=layout, algorithm="ring", num_heads=1, num_kv_heads=1
    )
    return Sawtooth.of(doc_ends, [plan.token_index(r) for r in range(cp)])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    tokenizer = make_tokenizer()
    store = build_store(CHATS, tokenizer, seq_length=128, config=DataConfig(), folder=tmp_path_factory.mktemp("store"))
    return tokenizer, store


def pack_of(store, pad_to=None):
    plan = plan_packs(store.lengths, seq_length=128)
    return plan, pack_documents([store.document(d) for d in plan.pack(0)], pad_to)


# -- picture --------------------------------------------------------------------------------------------------------


def area(points: str) -> float:
    xy = [tuple(map(float, p.split(","))) for p in points.split()]
    return abs(sum(a[0] * b[1] - b[0] * a[1] for a, b in zip(xy, [*xy[1:], xy[0]], strict=True))) / 2


@pytest.mark.parametrize("doc_ends", [(64,), (3, 10, 64), (1, 2, 3, 40), (8,)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "balanced"])
def test_the_svg_has_the_area_that_each_rank_computes(doc_ends, layout):
    tooth = sawtooth(doc_ends, cp=4, layout=layout)
    root = ET.fromstring(svg(tooth, size=1000))
    scale = (1000 / doc_ends[-1]) ** 2
    polygons = root.iter("{http://www.w3.org/2000/svg}polygon")
    drawn = dict.fromkeys(range(4), 0.0)
    for polygon in polygons:
        rank = next(r for r in range(4) if polygon.get("fill") == rank_colour(r))
        drawn[rank] += area(polygon.get("points")) / scale
    lengths = np.diff([0, *doc_ends])
    assert sum(drawn.values()) == pytest.approx(sum(n * n / 2 for n in lengths), rel=0.02)
    work, tokens = tooth.work(), tooth.tokens()
    for rank in range(4):  # a score entry is a unit square, half of it on the diagonal
        assert drawn[rank] == pytest.approx(work[rank] - tokens[rank] / 2, abs=0.02 * sum(n * n for n in lengths))
    assert sum(tokens) == doc_ends[-1]


def test_work_is_that_of_the_plan():
    ends = (5, 30, 31, 64)
    plan = AttentionPlan.build(
        ends, RankGrid(dp=1, ring=3), layout="balanced", algorithm="ring", num_heads=1, num_kv_heads=1
    )
    tooth = Sawtooth.of(ends, [plan.token_index(r) for r in range(3)])
    assert tooth.work() == [plan.work(r) for r in range(3)]


def test_the_picture_does_not_grow_with_the_square_of_the_tokens():
    assert len(svg(sawtooth((131_072,), cp=8))) < 20_000


def test_cells_show_the_sawtooth_and_nothing_across_documents():
    tooth = sawtooth((4, 8), cp=2, layout="contiguous")
    assert cells(tooth, 8)[0][0] == 0
    seen = np.array(cells(tooth, 8)) >= 0
    assert seen[3].tolist() == [True] * 7 + [False] * 9 or seen[3, :7].all()
    assert not seen[4:, :8].any()
    assert not seen[:4, 8:].any()
    leaking = np.array(cells(Sawtooth(doc_ends=(8,), owner=tooth.owner, num_ranks=2), 8)) >= 0
    assert leaking[4:, :8].any(), "one document: the picture would show it"
    plain = text(tooth, colour=False)
    assert "rank 1: 4 tokens, 50.0% of the work" in plain
    assert "\x1b" not in plain
    assert "\x1b[44m" in text(tooth, colour=True)


# -- rows -----------------------------------------------------------------------------------------------------------


def test_what_is_shown_of_a_pack_is_the_pack(prepared):
    tokenizer, store = prepared
    _, pack = pack_of(store)
    shown = list(documents_of(pack, tokenizer, 10_000))
    assert [s.row_id for s in shown] == list(pack.row_ids)
    assert "".join(t.text for s in shown for t in s.head) == tokenizer.decode(pack.ids.tolist())
    assert sum(s.num_trained for s in shown) == pack.num_targets
    trained = "".join(t.text for s in shown for t in s.head if t.kind == TRAINED)
    assert trained == tokenizer.decode(pack.targets[pack.targets >= 0].tolist())


def test_a_shifted_mask_would_be_seen(prepared):
    tokenizer, store = prepared
    _, pack = pack_of(store)
    object.__setattr__(pack, "targets", np.roll(pack.targets, 1))
    shown = list(documents_of(pack, tokenizer, 10_000))
    trained = "".join(t.text for s in shown for t in s.head if t.kind == TRAINED)
    assert trained != tokenizer.decode(pack.targets[pack.targets >= 0].tolist())


def test_long_documents_and_padding_are_put_together(prepared):
    tokenizer, store = prepared
    _, pack = pack_of(store, pad_to=140)
    *documents, pads = documents_of(pack, tokenizer, 8)
    assert all(len(s.head) + len(s.tail) + s.skipped == s.size for s in documents)
    assert any(s.skipped for s in documents)
    assert (pads.size, pads.head[0].kind) == (140 - sum(s.size for s in documents), PAD)


def test_the_terminal_obeys_nothing_that_data_say(prepared):
    tokenizer, _ = prepared
    ids = tokenizer("evil \x1b[2J\x07 text \u202e")["input_ids"]
    targets = np.append(ids[1:], -100)
    pack = pack_documents([Document(ids=np.array(ids), targets=targets, row_id="f\x1b[31m:1")])
    plain = terminal(pack, None, tokenizer, colour=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", plain)
    assert "\\x1b[2J" in plain
    assert "f\\x1b[31m:1" in plain


def test_trained_words_stand_in_brackets_without_colour(prepared):
    tokenizer, store = prepared
    row = next(i for i in range(len(store)) if store.row_id(i) == "rows:1")
    plain = terminal(
        pack_documents([store.document(row)]), sawtooth((len(store.document(row)),)), tokenizer, colour=False
    )
    assert "[caf\u00e9 fine <|im_end|>]" in plain
    assert "rows:1, " in plain
    coloured = terminal(pack_documents([store.document(row)]), None, tokenizer, colour=True)
    assert "\x1b[32mcaf" not in plain
    assert "\x1b[32m" in coloured


def test_the_page_stands_alone_and_escapes_what_data_say(prepared, tmp_path):
    tokenizer, store = prepared
    plan, _ = pack_of(store)
    rows = [{"text": "<script>alert(1)</script> & more"}]
    evil = build_store(rows, tokenizer, seq_length=128, config=DataConfig(), folder=tmp_path)
    pack = pack_documents([evil.document(0), store.document(0)], 200)
    tooth = sawtooth(pack.doc_ends)
    html = page(describe(store, plan), Histogram.of(store.lengths), plan, [(0, pack, tooth)], tokenizer, title="a<b")
    assert "<script" not in html
    assert re.sub(r"<[^>]*>", "", html).count("&lt;script") >= 1 or "&lt;" in html
    assert "a&lt;b" in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    for kind in (TRAINED, MASKED, PAD):
        assert f"<span class={kind}>" in html
    assert "<svg" in html
    assert "padding, " in html


# -- numbers --------------------------------------------------------------------------------------------------------


def test_percentiles_are_lengths_of_documents():
    lengths = np.array([1, 2, 3, 4, 100])
    assert percentiles(lengths) == (3, 100, 100, 100)


@pytest.mark.parametrize("lengths", [[1], [5] * 9, [1, 2], list(range(1, 5000)), [7, 131_072]])
def test_the_histogram_counts_every_document_once(lengths):
    histogram = Histogram.of(np.array(lengths))
    assert histogram.counts.sum() == len(lengths)
    assert (np.diff(histogram.edges) > 0).all()
    shown = histogram_text(histogram)
    assert len(shown.splitlines()) == len(histogram.counts)


def test_colour_is_for_terminals_and_can_be_turned_off(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour(Terminal())
    assert not use_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour(Terminal())
