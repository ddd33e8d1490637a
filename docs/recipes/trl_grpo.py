"""TRL's GRPO trainer with its rollout in FP8: a callback pushes the weights, a `rollout_func` takes the answers.

    python -m sglang.launch_server --model-path MODEL --quantization fp8_blockwise_online --port 30000
    python docs/recipes/trl_grpo.py http://127.0.0.1:30000 MODEL

TRL itself knows vLLM only: `use_vllm`, in both of its modes, speaks to vLLM and not to SGLang, so it stays unset. TRL
then corrects nothing by importance sampling. This trains a toy task, lower-case letters; put your prompts and
your reward in its place. One process: with FSDP or DeepSpeed the weights have to be gathered before they are
sent (`sglang_fp8rl.trainer.full_tensors` for FSDP2).

Tried: TRL 1.16.0 with SGLang 0.5.23 on a CPU: this file, three steps, each proven byte for byte. Not tried: on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from needs import THIS_PACKAGE, need

need("sglang_fp8rl", THIS_PACKAGE)
need("transformers", "pip install transformers")
import requests  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from sglang_fp8rl import RefitClient  # noqa: E402
from sglang_fp8rl.errors import Fp8RlError  # noqa: E402

TOKENS, SAMPLES = 16, 4


class ServedByFp8(TrainerCallback):
    """Sends the model before the first step and after each; any `transformers` trainer takes it.

    Attributes:
        verify: prove after each update that the server holds what was sent, byte for byte.
    """

    def __init__(self, url: str, *, verify: bool = False) -> None:
        self.client, self.verify = RefitClient(url), verify

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size > 1:
            raise SystemExit("error: several processes; gather the weights before they are sent")
        self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, weights = str(state.global_step), kwargs["model"].state_dict().items()
        self.client.update(weights, weight_version=step, verify=self.verify)

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """What TRL calls for answers: one to each prompt, which comes as often as there are to be samples."""
        ids = [trainer.processing_class(one)["input_ids"] for one in prompts]
        sampling = {"temperature": trainer.args.temperature}
        sampling["max_new_tokens"] = trainer.args.max_completion_length
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        answer = requests.post(self.client.url + "/generate", json=body, timeout=600)
        answer.raise_for_status()
        said = [one["meta_info"]["output_token_logprobs"] for one in answer.json()]
        return {
            "prompt_ids": ids,
            "completion_ids": [[token for _, token, *_ in one] for one in said],
            "logprobs": [[logprob for logprob, *_ in one] for one in said],
        }


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of lower-case letters: a toy."""
    return [sum(map(str.islower, one)) / max(len(one), 1) for one in completions]


def main(arguments: list[str]) -> None:
    """Train three steps."""
    if len(arguments) != 2:
        raise SystemExit("usage: trl_grpo.py URL MODEL")
    need("trl", "pip install --no-deps trl==1.16.0 (--no-deps keeps the SGLang environment)")
    import datasets
    import torch
    from trl import GRPOConfig, GRPOTrainer

    url, model = arguments
    served = ServedByFp8(url, verify=True)
    try:
        served.client.status()
    except Fp8RlError as error:  # before a model is loaded
        raise SystemExit(f"error: {error}") from None
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=4 * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    texts = [{"prompt": f"say {word}"} for word in ("yes", "no", "this", "that")]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=datasets.Dataset.from_list(texts * 3),
        rollout_func=served.rollout,
        callbacks=[served],
    )
    trainer.train()
    print("what is served is what was trained:", served.client.status()["state"])


if __name__ == "__main__":
    main(sys.argv[1:])
