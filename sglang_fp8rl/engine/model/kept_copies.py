"""Copies of a weight that SGLang makes at its first use and keeps: stale after the next update.

No update path of SGLang renews them, so its own BF16 refit leaves them behind too. Here every update
writes them again, in place, for a captured graph holds their address.

Each entry names the classes it was seen in, and can go with the last supported SGLang that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Attribute to the weight it is a copy of, both seen from the module that keeps it.
_KEPT = {
    # GLM-4.5 and GLM-4.7-Flash up to 0.5.16: the router's weight in FP32.
    "_weight_fp32": "weight",
    # Hunyuan V3 with the FP8 attention of HPC-Ops: the norms of queries and keys in FP32.
    "_hpc_q_norm_w_fp32": "q_norm.weight",
    "_hpc_k_norm_w_fp32": "k_norm.weight",
}
# The router's correction bias in the dtype of the logits (a ROCm kernel asks for it). It is renewed when
# the bias' version counts on, which a write through `.data` does not do.
_KEPT_BIAS = "_correction_bias_dtype_cache"


class KeptCopies:
    """The copies that one model may make.

    Args:
        model: as SGLang built it; its modules have the attributes by then, whether used or not.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._keepers: list[tuple[Any, str, torch.nn.Module, str]] = []
        self._routers: list[Any] = []
        for module in model.modules():
            for attribute, weight in _KEPT.items():
                if attribute in vars(module) or attribute in module._buffers:
                    owner, _, leaf = weight.rpartition(".")
                    self._keepers.append((module, attribute, module.get_submodule(owner), leaf))
            config: Any = vars(module).get("topk_config")
            if hasattr(config, _KEPT_BIAS):
                self._routers.append(config)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """`(copy, weight)` of every copy that has been made so far."""
        found = [(getattr(one, name), getattr(own, leaf)) for one, name, own, leaf in self._keepers]
        found += [(getattr(one, _KEPT_BIAS), one.correction_bias) for one in self._routers]
        return ((copy, weight) for copy, weight in found if copy is not None)

    def renew(self) -> None:
        """Give every copy the values of its weight, where it lies."""
        with torch.no_grad():
            for copy, weight in self:
                copy.copy_(weight)
