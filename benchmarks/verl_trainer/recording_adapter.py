"""What the server itself says after every refit, written down from inside veRL's trainer.

With `FP8RL_WRONG_SCALE` set, one weight is sent with a scale that is wrong by this factor: the run
that has to be seen to be wrong, though its server can't know.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from verl.workers.rollout.utils import ensure_async_iterator

from sglang_fp8rl.numerics import quantize
from sglang_fp8rl.verl_rollout.adapter import ServerAdapter
from verl_trainer.names import RECORD, WRONG_SCALE

WRONG_NAME = "model.layers.0.mlp.down_proj.weight"


class RecordingAdapter(ServerAdapter):
    """Appends a line to the file that `FP8RL_RECORD` names, for every refit."""

    async def update_weights(self, weights: Any, global_steps: Any = None, **kwargs: Any) -> None:
        factor = os.environ.get(WRONG_SCALE)
        if factor:
            weights = _with_wrong_scale(weights, float(factor))
        began = time.perf_counter()
        await super().update_weights(weights, global_steps=global_steps, **kwargs)
        seconds = time.perf_counter() - began
        if self._group.leads:
            entry = {"step": global_steps, "seconds": seconds, **self._said_by_server()}
            with Path(os.environ[RECORD]).open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def _said_by_server(self) -> dict[str, Any]:
        """`status` (None from a server of another method), `quantization`, and `weight_version`."""
        info, model = (self._connection.get(path) for path in ("/server_info", "/model_info"))
        return {
            "status": info["internal_states"][0].get("fp8rl"),
            "quantization": info["quantization"],
            "weight_version": model["weight_version"],
        }


async def _with_wrong_scale(weights: Any, factor: float) -> AsyncIterator[tuple[str, Any]]:
    async for name, tensor in ensure_async_iterator(weights):
        if name == WRONG_NAME:
            codes, scale = quantize(tensor.detach().cpu(), (128, 128), backend="reference")
            yield name, codes
            yield f"{name}_scale_inv", scale * factor
        else:
            yield name, tensor
