"""The casts and tables on a GPU, through Triton."""

import triton
from packaging.version import Version

from ...errors import HostError

if Version(triton.__version__) < Version("3.6"):
    raise HostError(
        "triton",
        f"version {triton.__version__}",
        "before 3.6 its IEEE division takes subnormal numbers for zero: scales that nothing else computes",
        "Install torch 2.10 or newer, which brings it.",
    )
