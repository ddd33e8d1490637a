"""The public casts as plain torch does them: what other ways of casting are compared with."""

from functools import partial

from sglang_fp8rl import numerics

quantize_blockwise = partial(numerics.quantize_blockwise, backend="reference")
quantize_per_channel = partial(numerics.quantize_per_channel, backend="reference")
