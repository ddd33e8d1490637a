"""Imported once by a fork server (see `launch` and the engine tests), so that no worker pays again.

It has to be in an installed package: in Python 3.11 a fork server does not see its parent's
`sys.path`, and a preload that it can't import is skipped in silence.
"""

import gc

import torch
from sglang.srt.entrypoints import http_server  # noqa: F401
from sglang.srt.models.registry import ModelRegistry

from ...engine.host import hooks  # noqa: F401
from ...numerics import quantize_blockwise

ModelRegistry.get_supported_archs()
quantize_blockwise(torch.ones(1, 1))  # Numba's cast is compiled, or loaded
# A million objects that stay: a child that collects garbage would look at each, and copy its page for that.
gc.collect()
gc.freeze()
