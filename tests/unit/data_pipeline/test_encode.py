import pytest

from data_pipeline.encode import Encoder
from raycp.errors import ModelError

from .tiny_tokenizers import make_tokenizer


def tokens(encoder: Encoder, encoded) -> list[str]:
    return encoder.tokenizer.convert_ids_to_tokens(encoded.ids.tolist())


def test_prefix_is_what_the_tokenizer_puts_before_plain_text():
    assert Encoder(make_tokenizer("chatml")).prefix_ids.tolist() == []
    llama = make_tokenizer("llama2")
    assert Encoder(llama).prefix_ids.tolist() == [llama.bos_token_id]


def test_offsets_count_tokens_before_a_character():
    encoder = Encoder(make_tokenizer())
    text = "caf\u00e9 <|im_end|> the capital"
    encoded = encoder.encode(text)
    assert encoded.ids.tolist() == encoder.tokenizer(text)["input_ids"]
    assert encoded.count_before(len(text)) == encoded.ids.size
    assert encoded.count_before(0) == 0
    end = text.index(" the")
    assert tokens(encoder, encoded)[encoded.count_before(end) - 1] == "<|im_end|>"


def test_protected_text_cannot_forge_a_special_token():
    encoder = Encoder(make_tokenizer())
    for text in ("<|im_end|>", "a<|im_start|><|im_end|>b \ue0000\ue001 c", "no specials"):
        literals: list[str] = []
        marked = encoder.protect(text, literals)
        encoded = encoder.encode(marked, literals)
        assert not set(encoded.ids.tolist()) & set(encoder.added_ids.tolist())
        assert encoder.tokenizer.decode(encoded.ids.tolist()) == text
    assert encoder.added_ids[0] in encoder.encode("<|endoftext|>").ids  # unprotected, it is one
    assert encoder.tokenizer("<|im_end|>")["input_ids"] == [encoder.eos_id]  # and no state is left behind


def test_straddled_sees_a_token_over_a_border_and_a_cut_removes_it():
    encoder = Encoder(make_tokenizer())
    text = "<|im_start|>user: the capital"
    inside = text.index("capital")  # " capital" is one token here, its space before the border
    assert encoder.straddled(text, encoder.encode(text), inside)
    cut = encoder.encode(text, cuts=[inside])
    assert not encoder.straddled(text, cut, inside)
    assert encoder.tokenizer.decode(cut.ids.tolist()) == text
    assert cut.ids.tolist()[: cut.count_before(inside)] == encoder.encode(text[:inside]).ids.tolist()
    assert not encoder.straddled(text, encoder.encode(text), inside - 1)


def test_cuts_and_protected_pieces_together():
    encoder = Encoder(make_tokenizer())
    literals: list[str] = []
    marked = encoder.protect("one <|im_end|> two three", literals)
    encoded = encoder.encode(marked, literals, cuts=[4, marked.index("three")])
    assert encoder.tokenizer.decode(encoded.ids.tolist()) == "one <|im_end|> two three"
    assert encoded.count_before(len(marked)) == encoded.ids.size


def test_digest_follows_what_decides_the_ids():
    same = [Encoder(make_tokenizer()).digest() for _ in range(2)]
    assert same[0] == same[1]
    padded = make_tokenizer()
    padded(["a", "a b c"], padding=True)
    assert Encoder(padded).digest() == same[0]
    assert Encoder(make_tokenizer("llama2")).digest() != same[0]
    assert Encoder(make_tokenizer(eos_token="<|endoftext|>")).digest() != same[0]


def test_slow_tokenizers_are_refused():
    class Slow:
        is_fast = False
        name_or_path = "old"

    with pytest.raises(ModelError, match=r"'old' .* is not a fast tokenizer"):
        Encoder(Slow())
