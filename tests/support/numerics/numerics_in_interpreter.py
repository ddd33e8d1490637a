"""Run the Triton casts on saved cases: `python numerics_in_interpreter.py IN OUT`.

A process of its own, because TRITON_INTERPRET has to be set before Triton is imported.
"""

import sys

import torch

from sglang_fp8rl.numerics import cast_into
from sglang_fp8rl.numerics.cast import copy_finite_into
from support.numerics.numerics_cases import destination, outside_is_untouched, scale_shape


def run(jobs: list[dict]) -> list[tuple]:
    """A cast has `source`, `per_channel`, `options`; codes, scales, flags and rim come back. A copy has `source`
    and `to`; what was written and flags come back."""
    results: list[tuple] = []
    for job in jobs:
        source = job["source"]
        if "to" in job:
            out = torch.full(source.shape, 3.0, dtype=job["to"], device=source.device)
            results.append((out, copy_finite_into(source, out, backend="triton")))
            continue
        block = (1, source.shape[1]) if job["per_channel"] else (128, 128)
        shape = scale_shape(source, job["per_channel"])
        outer, qweight, rim, scales = destination(*source.shape, shape, source.device)
        flags = cast_into(source, qweight, scales, block, backend="triton", **job["options"])
        intact = outside_is_untouched(outer, rim, *source.shape)
        results.append((qweight.clone(), scales.clone(), flags, intact))
    return results


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1])), sys.argv[2])
