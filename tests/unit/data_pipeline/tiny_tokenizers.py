"""Tokenizers and chat templates of the tests: a BPE trained on the spot, and templates of several families."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
REWRITES_HISTORY = (  # as Qwen3 does: thinking of earlier turns is dropped
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_STOP = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
TAGS_WITHOUT_STOP = CHATML_TAGS.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}", "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>' }}"
)
TAGS_AROUND_NOTHING = CHATML_TAGS.replace(
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{% generation %}{% endgeneration %}{{ m['content'] + '<|im_end|>' }}",
)

CORPUS = [
    "You are a helpful assistant. What is the capital of France? The capital of France is Paris.",
    "Hello there, how are you today? I am fine, thank you. Tell me more about tokens and packing.",
    "system user assistant question answer one two three four five six seven eight nine ten.",
]
SPECIALS = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama2": ["<unk>", "<s>", "</s>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


@cache
def _backend(family: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS[family],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    bos = {"llama2": "<s>", "llama3": "<|begin_of_text|>"}.get(family)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer.to_str()


def make_tokenizer(family: str = "chatml", template: str | None = CHATML, **kwargs: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of about 400 tokens: "chatml" has no BOS, "llama2" and "llama3" put one before plain text."""
    names = {
        "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
        "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    }[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend(family)),
        additional_special_tokens=[s for s in SPECIALS[family] if s not in names.values()],
        **{**names, **kwargs},
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of alternating user and assistant turns."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


MISTRAL = (  # one BOS, the system prompt inside the last question, no space before [INST]
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{{ bos_token }}{% for m in turns %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles after the system message') }}{% endif %}{% endfor %}"
)
THINKING = (  # as Qwen writes: reasoning in front of the last answer, tools, and tags around what the model writes
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{ t | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{% if m['reasoning_content'] is defined and loop.last %}"
    "{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<tool_call>\n' }}{{ call['function'] | tojson }}"
    "{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
