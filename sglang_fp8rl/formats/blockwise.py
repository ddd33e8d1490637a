"""One scale for each block of 128×128: the format of DeepSeek-V3's checkpoints, which SGLang's own code serves."""

from __future__ import annotations

from .format import Format


class Blockwise(Format):
    """`[N, K]` has scales of shape `[ceil(N / 128), ceil(K / 128)]`, `weight_scale_inv`."""

    name = "blockwise"
    block_size = (128, 128)
    scale_suffix = "_scale_inv"
    weight_block_size = [128, 128]  # noqa: RUF012
