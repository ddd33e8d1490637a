"""What SGLang needs for a class that is not built here, as the error says that it gave."""

from __future__ import annotations

import re

from .outcome import Row

# What an error says (a regular expression), and what of SGLang's is behind it.
_NEEDS = {
    r"causal_conv1d_fn": "SGLang needs a GPU: the file imports CUDA's convolution",
    r"only supports CUDA backend": "SGLang needs a GPU, and says so",
    r"requires FA3 attention": "SGLang needs a GPU: FlashAttention 3",
    r"requires flashinfer": "SGLang needs a GPU: FlashInfer",
    r"name 'ms' is not defined": "SGLang needs the package `mindspore`",
    r"audio_tokenizer/config.json": "SGLang needs an audio tokenizer, with weights, beside the checkpoint",
    r"KeyError: 'model\.layers\.0\.self_attn\.kv_b_proj\.weight'": (
        "SGLang deletes `kv_b_proj` at the first load, and fails at the second"
    ),
    r"object of type 'NoneType' has no len\(\)": (
        "SGLang fails at the end of every load: its text model does not say what it loaded"
    ),
    r"unexpected keyword argument 'start_layer'": (
        "SGLang fails to build it: its decoder layers don't take what its text model gives them"
    ),
    r"^TorchNative.*reach 0 of 0 ": "SGLang fills nothing of it by `load_weights`, only by `--load-format layered`",
}


def needs(row: Row) -> str:
    """In words; the error itself where nothing is known of it."""
    said = f"{row.architecture}: {'; '.join(row.reasons)}"
    known = (what for pattern, what in _NEEDS.items() if re.search(pattern, said))
    return next(known, row.reasons[0] if row.reasons else "")
