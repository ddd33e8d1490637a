"""Run the Triton product on saved cases: `python linear_in_interpreter.py IN OUT`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import sys

import torch

from sglang_fp8rl.numerics.triton.linear import linear


def run(jobs: list[tuple]) -> list[torch.Tensor]:
    """Each job is `x`, codes, and their scales."""
    return [linear(*job) for job in jobs]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1], weights_only=False)), sys.argv[2])
