"""Compare the Triton fingerprint with the definition in torch: `python fingerprint_in_interpreter.py`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import torch

from sglang_fp8rl.numerics import fingerprint as definition
from sglang_fp8rl.numerics.triton import fingerprint as kernels

# Rows, bytes of a row in memory, bytes left out in front, bytes behind.
CUTS = (
    (1, 64, 0, 0),
    (3, 64, 0, 0),
    (70, 2052, 0, 0),
    (130, 1024, 16, 8),
    (9, 4, 0, 0),
    (64, 8192, 1024, 4),
)
SEEDS = (5, 2**40 + 3, 2**64 - 7)


def matrices(dtype: torch.dtype, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    for rows, width, before, behind in CUTS:
        every = torch.randint(0, 256, (rows, width), dtype=torch.uint8, generator=generator)
        size = torch.empty(0, dtype=dtype).element_size()
        cut = slice(before // size, (width - behind) // size)
        yield before, every.to(device).view(dtype)[:, cut]


def differing(device: str = "cpu") -> list[str]:
    """What the kernel says otherwise than the definition."""
    found = []
    column_keys = definition._column_keys(8192)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        for before, matrix in matrices(dtype, device):
            assert definition.lies_on(kernels.UNIT, matrix, before)
            for seed in SEEDS:
                arguments = (matrix, 11, before, seed, column_keys)
                number = int(kernels.matrix_number(*arguments)) & definition.MASK
                if number != definition.by_torch(*arguments):
                    found.append(f"{dtype} {tuple(matrix.shape)} from byte {before}, seed {seed}")
    return found


if __name__ == "__main__":
    if found := differing():
        raise SystemExit("\n".join(found))
