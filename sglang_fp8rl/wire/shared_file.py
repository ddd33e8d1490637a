"""A file of shared memory as torch makes it: int32 readers, padding up to 64 bytes, the tensors.

`MapInfo` and `map_alloc_alignment` in torch's ATen/MapAllocator.cpp.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

FILES = Path("/dev/shm")  # where Linux keeps what `shm_open` names
HEADER = 64
READERS = struct.Struct("=i")


def file_of(handle: bytes) -> Path:
    """The file that a handle (`/torch_PID_…`) names."""
    return FILES / os.fsdecode(handle).removeprefix("/")
