"""Run the Triton cast and back on saved cases: `python through_in_interpreter.py IN OUT`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import sys

import torch

from sglang_fp8rl.numerics import through_fp8


def run(jobs: list[tuple]) -> list[torch.Tensor]:
    """Each job is a source, a granularity and the options of `through_fp8`."""
    return [
        through_fp8(source, granularity, backend="triton", **options)
        for source, granularity, options in jobs
    ]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1], weights_only=False)), sys.argv[2])
