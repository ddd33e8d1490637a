"""Numbers of saved tensors by the GPU's kernel: `python fingerprint_in_interpreter.py IN OUT`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import sys

import torch

from sglang_fp8rl.numerics import fingerprint
from sglang_fp8rl.numerics.triton import fingerprint as on_gpu

Boxes = list[list[fingerprint.Box]]


def run(tensors: Boxes) -> list[list[int]]:
    """Of all tensors at once, by the kernel whatever device they are on; twice by the same tables."""
    parts = [
        (number, matrix)
        for number, boxes in enumerate(tensors)
        for box in boxes
        if box.tensor.numel()
        for matrix in fingerprint._matrices(box)
    ]
    laid_out = on_gpu.LaidOut(parts, len(tensors))
    return [[value & fingerprint.MASK for value in laid_out.start().tolist()] for _ in range(2)]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1], weights_only=False)), sys.argv[2])
