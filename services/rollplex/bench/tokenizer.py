"""A tokenizer with Qwen2.5-VL's vocabulary size and special token ids, and no merges: one token a byte of text.

It is made in a second, and prompt lengths can be met to the token. What random weights sample decodes to words of no meaning.
"""

from __future__ import annotations

from tokenizers import AddedToken, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from rollplex.demo.tokenizer import CHAT_TEMPLATE

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)
"""In Qwen2.5-VL's order, from the first id after its ordinary tokens."""


def build_tokenizer(vocab_size: int, first_special: int, max_tokens: int) -> Qwen2Tokenizer:
    """Exactly `vocab_size` tokens, so that every id that can be sampled can be decoded."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = vocab_size - first_special - len(SPECIAL_TOKENS)
    special = [*SPECIAL_TOKENS, *(f"<|extra_{number}|>" for number in range(extra))]
    words = [*alphabet, *(_word(number) for number in range(first_special - len(alphabet))), *special]
    # The special ones are in the vocabulary from the start, or the end and pad tokens would get the first free ids.
    tokenizer = Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token=None, eos_token="<|im_end|>",
        pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE, model_max_length=max_tokens)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    found = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    if len(tokenizer) != vocab_size or found != list(range(first_special, first_special + len(SPECIAL_TOKENS))):
        raise ValueError(f"{len(tokenizer)} tokens, not {vocab_size}, or special ones not from {first_special} on: {found}")
    return tokenizer


def _word(number: int) -> str:
    """A space and four letters; never made of text, since there are no merges."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return "\u0120" + letters
