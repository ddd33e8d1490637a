"""A Llama's twin whose linear layers are whole blocks of 128: the same function, padded with zeros.

The hidden size and the number of heads are raised to the next multiples. What is added to the residual stream
stays zero; a norm takes its mean over more elements, which its weight and epsilon make up for; a head that is
added has values of zero, and query heads share key heads as before.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

BLOCK = 128


def aligned_config(config: Any) -> Any:
    """The twin's configuration. The size of a head and of the MLP stay as they are."""
    twin = copy.deepcopy(config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads
    twin.head_dim = head
    step = BLOCK // math.gcd(BLOCK, head)
    twin.num_key_value_heads = -(-config.num_key_value_heads // step) * step
    twin.num_attention_heads = shared * twin.num_key_value_heads
    # transformers refuses a Llama whose heads do not divide it.
    unit = math.lcm(BLOCK, twin.num_attention_heads)
    twin.hidden_size = -(-config.hidden_size // unit) * unit
    twin.rms_norm_eps = config.rms_norm_eps * config.hidden_size / twin.hidden_size
    return twin


def aligned_model(model: Any) -> Any:
    """A model of the same class that says the same, up to rounding, in the same dtype."""
    twin = type(model)(aligned_config(model.config)).to(model.dtype).eval()
    scale = math.sqrt(model.config.hidden_size / twin.config.hidden_size)
    given = model.state_dict()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            source = given[name] * scale if "norm" in name else given[name]
            parameter.zero_()
            parameter[tuple(slice(size) for size in source.shape)] = source
    return twin
