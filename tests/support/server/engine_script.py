"""`python engine_script.py FRESH UPDATE`: the Python `Engine` on FRESH, updated to UPDATE.

A user's program: it calls no plugin loader and imports nothing of this package to serve. The last
line it prints is JSON (see `served.EngineRun`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from safetensors.torch import load_file

from sglang_fp8rl.lab.testing.outputs import ask
from support.server.served import NEW_TOKENS, PROMPTS


class AskedLikeAServer:
    """`generate` of `RefitClient`, for an engine in this process."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def generate(self, input_ids: list[int], max_new_tokens: int) -> Any:
        sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        return self.engine.generate(
            input_ids=input_ids,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0,
        )


def main(fresh: str, update: str) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=fresh,
        quantization="fp8_blockwise_online",
        skip_tokenizer_init=True,
        log_level="warning",
    )
    client: Any = AskedLikeAServer(engine)

    def say() -> list[tuple]:
        return [(output.tokens, output.logprobs) for output in ask(client, PROMPTS)]

    def status() -> Any:
        return engine.get_server_info()["internal_states"][0]["fp8rl"]

    said: dict[str, Any] = {"fresh": say(), "status": [status()]}
    tensors = list(load_file(f"{update}/model.safetensors").items())
    said["answers"] = [
        engine.update_weights_from_tensor(tensors[:7], flush_cache=False),
        engine.update_weights_from_tensor(tensors[7:]),
    ]
    said["updated"] = say()
    said["status"].append(status())
    print("\n" + json.dumps(said), flush=True)
    engine.shutdown()
    del tensors  # torch's manager of shared memory is still there to be told


if __name__ == "__main__":
    main(*sys.argv[1:])
