"""A tokenizer for a seeded checkpoint: one token per byte, and a chat template."""

from __future__ import annotations

from pathlib import Path

# Ids 0 to 2; a checkpoint's `bos_token_id` and `eos_token_id` are 1 and 2.
SPECIAL = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_tokenizer(path: str | Path) -> None:
    """Write a byte-level tokenizer of 259 tokens beside a checkpoint's `config.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(path))
