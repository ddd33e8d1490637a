"""What the server itself says after every refit, written down from inside veRL's trainer.

With `FP8RL_WRONG_SCALE` set, one weight is sent with a scale that is wrong by this factor: the run
that has to be seen to be wrong, though its server can't know.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from verl.workers.rollout.utils import ensure_async_iterator

from sglang_fp8rl.numerics import Blockwise, quantize
from sglang_fp8rl.verl_rollout.adapter import ServerAdapter
from sglang_fp8rl.wire.pair import PAIR_SUFFIX, pack_pair
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
        if self._leads:
            entry = {"step": global_steps, "seconds": seconds, **await self._said_by_server()}
            with Path(os.environ[RECORD]).open("a") as file:
                file.write(json.dumps(entry) + "\n")

    async def _said_by_server(self) -> dict[str, Any]:
        """`status` (None from a server of another method), `quantization`, and `weight_version`."""
        status = await self._server.get("fp8rl/status", or_not=HTTPStatus.NOT_FOUND)
        info = await self._server.get("server_info", or_not=HTTPStatus.NOT_FOUND)
        model = await self._server.get("model_info", or_not=HTTPStatus.NOT_FOUND)
        return {
            "status": status,
            "quantization": info["quantization"],
            "weight_version": model["weight_version"],
        }


async def _with_wrong_scale(weights: Any, factor: float) -> AsyncIterator[tuple[str, Any]]:
    async for name, tensor in ensure_async_iterator(weights):
        if name == WRONG_NAME:
            codes, scale = quantize(tensor.detach().cpu(), Blockwise(), backend="reference")
            yield name + PAIR_SUFFIX, pack_pair(codes, scale * factor)
        else:
            yield name, tensor
