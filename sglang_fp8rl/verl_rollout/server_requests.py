"""What veRL's adapter sends its server: one rank's weights as flattened buckets, and requests, one try each."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import aiohttp
import torch
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights
from verl.utils.device import get_device_id
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from ..errors import RefitError
from ..wire.bucket import Payload, payload_of


class Server:
    """One SGLang server, asked over HTTP.

    Args:
        url: without a slash at its end.
        patience: seconds for one request.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.url, self.patience = url, patience

    async def post(self, endpoint: str, body: dict[str, Any] | None = None) -> Any:
        """The answer as JSON.

        Raises:
            RefitError: it was refused, with the server's words; or there was no answer.
        """
        return await self._ask("POST", endpoint, body or {})

    async def get(self, endpoint: str, *, or_not: HTTPStatus) -> Any:
        """The answer as JSON; None if the server answers `or_not`.

        Raises:
            RefitError: as `post`.
        """
        return await self._ask("GET", endpoint, None, or_not)

    async def _ask(
        self, method: str, endpoint: str, body: Any, or_not: HTTPStatus | None = None
    ) -> Any:
        timeout = aiohttp.ClientTimeout(total=self.patience)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.request(method, f"{self.url}/{endpoint}", json=body) as answer,
            ):
                if answer.status == or_not:
                    return None
                if not answer.ok:
                    raise _refused(f"{method} /{endpoint}", answer.status, await answer.text())
                is_json = "json" in answer.headers.get("content-type", "")
                return await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            raise RefitError(
                f"{method} {self.url}/{endpoint}",
                f"no answer ({type(error).__name__}: {error})",
                "weights go to a server that runs; the one that this rollout started is gone, or "
                f"took longer than {self.patience:.0f} s",
                "The log of its actor (sglang_server_*) says why. veRL does not start it again: go "
                "on from the last checkpoint of the training.",
            ) from error


def _refused(request: str, status: int, text: str) -> RefitError:
    return RefitError(
        request,
        f"HTTP {status}",
        f"the server answered: {text[:2000]}",
        "It goes on serving; GET /fp8rl/status names what is old. Compare the trainer's model with "
        "the server's: `GET /fp8rl/plan` has its names and shapes.",
    )


FLATTENED = "flattened_bucket"


class FlatBuckets:
    """Args:
    weights: named tensors, as veRL hands them to each rank.
    bucket_bytes: a bucket ends before the tensor that would pass this size.
    """

    def __init__(self, weights: Any, bucket_bytes: int) -> None:
        # What SGLang does before it pickles: handles of CUDA memory name the GPU, not its number.
        monkey_patch_torch_reductions()
        self._buckets = get_named_tensor_buckets(weights, bucket_bytes)
        self._payload: Payload | None = None  # stays alive until the next is asked for

    async def next_text(self) -> str | None:
        """The next bucket for the server, which reads it out of this process; None at the end."""
        bucket = await anext(self._buckets, None)
        if bucket is None:
            return None
        named = [(_plain_name(name), _local(tensor)) for name, tensor in bucket]
        self._payload = payload_of(named, FLATTENED, ranks=1, layout_as_text=True)
        return self._payload.texts[0]


def is_the_end(texts: list[Any]) -> bool:
    """Whether no rank has a bucket any more.

    Args:
        texts: of all ranks: a bucket, None, or the `RefitError` that it met.

    Raises:
        RefitError: a rank could not make its own, or has fewer than the others.
    """
    failed = next((text for text in texts if isinstance(text, RefitError)), None)
    if failed is not None:
        raise failed
    ended = [rank for rank, text in enumerate(texts) if text is None]
    if ended and len(ended) < len(texts):
        raise RefitError(
            "a refit",
            f"rank(s) {ended} of {len(texts)} have no more tensors, the others have",
            "every rank of a server's group is given the same tensors",
            "Check what the trainer hands to update_weights on these ranks.",
        )
    return bool(ended)


def _plain_name(name: str) -> str:
    """veRL wraps layers under LoRA; the server knows no `base_layer`."""
    return name.replace(".base_layer.", ".")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """On the device whose memory the server can read, as veRL sends it."""
    full = _preprocess_tensor_for_update_weights(tensor.detach())
    return full.to(get_device_id()) if full.device.type == "cpu" else full
