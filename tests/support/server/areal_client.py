"""What AReaL's `RemoteInfEngine` sends to one server around an update from disk, by its own builders.

Called with the server's URL and a checkpoint; prints, as JSON, the tokens and log-probabilities that its
own parser reads from the answer to `PROMPT`.
"""

from __future__ import annotations

import json
import sys

import requests
from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import HttpRequest, ModelRequest, WeightUpdateMeta
from areal.engine.sglang_remote import SGLangBackend


def main(url: str, checkpoint: str, prompt: list[int], new_tokens: int) -> None:
    def send(request: HttpRequest) -> requests.Response:
        answer = requests.request(
            request.method, url + request.endpoint, json=request.payload, timeout=300
        )
        answer.raise_for_status()
        return answer

    backend = SGLangBackend()
    send(backend.get_health_check_request())
    send(backend.get_pause_request())
    meta = WeightUpdateMeta(type="disk", path=checkpoint)
    for request in backend.build_disk_weight_update_requests(meta).requests:
        assert send(request).json()["success"]
    send(backend.get_resume_request())
    settings = GenerationHyperparameters(greedy=True, max_new_tokens=new_tokens, ignore_eos=True)
    asked = ModelRequest(input_ids=prompt, gconfig=settings)
    answer = send(backend.build_generation_request(asked, with_lora=False, version=0))
    said = backend.parse_generation_response(answer.json())
    print(json.dumps([said.output_tokens, said.output_logprobs]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
