"""Run the Triton kernel of `doubled` on saved cases: `python doubled_in_interpreter.py IN OUT`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import sys

import torch

from sglang_fp8rl.numerics.triton.linear import doubled

if __name__ == "__main__":
    jobs = torch.load(sys.argv[1])
    torch.save([doubled(*job) for job in jobs], sys.argv[2])
