"""Which process a request's tensors come from, as far as its handles of shared memory say."""

from __future__ import annotations

import base64
import re
from typing import Any

# torch names shared memory and the counters of CUDA handles after the process that made them; a file
# descriptor is fetched from a socket that each process names for itself.
_HANDLE = re.compile(rb"/torch_(\d+)_|/(listener-\w+)")
_LOOKED_AT = 65_536  # bytes: the first handle is the first thing in a payload


def sender_of(request: Any, rank: int) -> str | None:
    """A name for the sender that stays the same; None where nothing tells.

    Args:
        request: SGLang's update request.
        rank: whose payload to look at.
    """
    group = getattr(request, "group_name", None)
    if group is not None:
        return f"group {group}"
    payloads = getattr(request, "serialized_named_tensors", None) or ()
    if rank >= len(payloads):
        return None
    start = payloads[rank][:_LOOKED_AT]
    try:
        found = _HANDLE.search(base64.b64decode(start) if isinstance(start, str) else start)
    except ValueError:  # not base64: refused when it is read
        return None
    return None if found is None else f"process {(found[1] or found[2]).decode()}"
