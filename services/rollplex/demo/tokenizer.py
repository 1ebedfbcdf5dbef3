"""The demo checkpoint's tokenizer: byte-level BPE with Qwen's special tokens, small enough to train on the spot."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# One token each, but ordinary text: the reward rules read them in the decoded response.
FORMAT_TOKENS = ("<think>", "</think>", "<answer>", "</answer>")
# Qwen2.5-VL's structure: ChatML turns, media parts as placeholders in their place among the text. No default system turn.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def build_tokenizer(corpus: list[str], vocab_size: int) -> Qwen2Tokenizer:
    """Train on `corpus` a tokenizer of exactly `vocab_size` tokens; it can spell any text byte by byte.

    The size is exact so that the model has no embedding rows without a token: such an id could be sampled, but not decoded.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in FORMAT_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    trained = json.loads(core.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(pair) for pair in trained["merges"]],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )
    tokenizer.add_tokens(added)
    if len(tokenizer) != vocab_size:
        raise ValueError(f"the corpus gives {len(tokenizer)} tokens, not vocab_size={vocab_size}; choose that or less")
    return tokenizer
