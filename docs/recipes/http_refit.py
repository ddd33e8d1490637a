"""A refit over plain HTTP: requests, torch, and this package's wire format; no RefitClient, no SGLang here.

    python docs/recipes/http_refit.py http://127.0.0.1:30000 CHECKPOINT

sends what lies in a directory of safetensors; a trainer calls `refit` with its own tensors, under the names of the
checkpoint. The server has to be on this machine: what is sent are handles of shared memory.

Tried: SGLang 0.5.23 on a CPU, with its sessions and as if it had none, against the outputs of a fresh server.
Not tried: on a GPU by this file (its wire format was, by RefitClient).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from needs import THIS_PACKAGE, need

need("sglang_fp8rl", THIS_PACKAGE)
import requests  # noqa: E402
import torch  # noqa: E402

from sglang_fp8rl.checkpoint import safetensors_files, tensors_in  # noqa: E402
from sglang_fp8rl.wire.bucket import buckets_of  # noqa: E402


def post(url: str, path: str, **body: object) -> bool:
    """False where a session can't begin, as there are none; leaves with the server's words where it refuses."""
    answer = requests.post(url + path, json=body, timeout=600)
    if answer.status_code == 404 and path == "/begin_weight_update":  # no sessions here
        return False
    if not answer.ok or not answer.json().get("success", True):
        raise SystemExit(f"error: POST {path}: HTTP {answer.status_code}: {answer.text}")
    return True


def refit(url: str, named_tensors: Iterable[tuple[str, torch.Tensor]], limit: int = 1 << 29) -> int:
    """Send FP32 or BF16 tensors in buckets of about `limit` bytes; returns how many buckets."""
    info = requests.get(url + "/server_info", timeout=60)
    if (
        not info.ok
    ):  # a server with an API key wants it in each request: headers={"Authorization": "Bearer KEY"}
        raise SystemExit(f"error: GET /server_info: HTTP {info.status_code}: {info.text}")
    ranks = info.json()["tp_size"]
    in_session = post(url, "/begin_weight_update")  # SGLang has them since 0.5.21
    buckets = 0
    try:
        for bucket, is_last in buckets_of(named_tensors, limit):
            payload = bucket.payload(ranks, layout_as_text=True)  # kept until it is answered
            body = {"serialized_named_tensors": payload.texts, "load_format": "flattened_bucket"}
            post(url, "/update_weights_from_tensor", **body, flush_cache=is_last)
            buckets += 1
    except BaseException:
        if in_session:  # or it is open still when the next one comes
            requests.post(url + "/end_weight_update", json={}, timeout=600)
        raise
    if in_session:
        post(url, "/end_weight_update")
    return buckets


if __name__ == "__main__":
    if len(sys.argv) != 3 or not (files := safetensors_files(Path(sys.argv[2]))):
        raise SystemExit("usage: http_refit.py URL CHECKPOINT, a directory with *.safetensors")
    try:
        print(f"sent in {refit(sys.argv[1].rstrip('/'), tensors_in(files))} buckets")
    except requests.RequestException as error:
        raise SystemExit(f"error: no server answers at {sys.argv[1]}; start one: {error}") from None
