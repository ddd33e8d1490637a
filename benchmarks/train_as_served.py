"""Training what is served, with plain `transformers` and with TRL: the recipes of docs/trainer.md, run.

A small Qwen3 learns to answer in lower-case letters. Before each step its weights are sent, the model is proven to
compute with the bytes that the server holds then, and k3 of the answers is printed.

    PYTHONPATH=benchmarks python benchmarks/train_as_served.py [--trl]
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import measured
import torch
import typer
from rollout_server import RolloutServer
from verl_trainer.model import make_model

from sglang_fp8rl import RefitClient
from sglang_fp8rl.lab.eval.gap import rescore
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.lab.metrics import mismatch_metrics
from sglang_fp8rl.trainer.served_weights import check_as_served, compute_as_served, plan_of

PROMPTS, SAMPLES, TOKENS, END = 4, 4, 16, 2
Row = dict[str, Any]


def refit_and_sample(
    model: Any, server: RolloutServer, prompts: Sequence[list[int]], rows: list[Row]
) -> list[Rollout]:
    """What both recipes do before a step; adds a row of what was found."""
    client = RefitClient(server.url)
    client.update(model.state_dict().items(), plan=plan_of(model))
    proven = check_as_served(model, client).compared
    rollouts = server.answers(prompts, TOKENS, [END], 1.0)
    scored = torch.cat(rescore(model, rollouts))[None]
    said = torch.tensor([[value for one in rollouts for value in one.logprobs]])
    gap = mismatch_metrics(said, scored, torch.ones_like(said))
    rows.append({"tokens": gap.tokens, "k3": gap.kl_k3})
    rows[-1] |= {"proven": proven, "reward": sum(map(reward, rollouts)) / len(rollouts)}
    return rollouts


def reward(rollout: Rollout) -> float:
    """Share of lower-case letters; a token is a byte, behind three special ones and in the tokenizer's order."""
    return rewarded(rollout.output_ids) / TOKENS


def rewarded(ids: Sequence[int]) -> int:
    return sum(first_letter() <= one < first_letter() + 26 for one in ids)


def first_letter() -> int:
    """Id of `a`: bytes from `!` on are in order."""
    return 3 + ord("a") - ord("!")


def plain(
    model: Any, server: RolloutServer, prompts: list[list[int]], steps: int, rows: list[Row]
) -> None:
    """`transformers` and a policy gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        rollouts = refit_and_sample(model, server, prompts, rows)
        rewards = torch.tensor([reward(one) for one in rollouts])
        loss = torch.zeros(())
        for one, advantage in zip(rollouts, rewards - rewards.mean(), strict=True):
            ids = torch.tensor([one.prompt_ids + one.output_ids])
            logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1].float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(one.output_ids)[:, None])
            loss = loss - advantage * chosen.sum() / len(rollouts)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def with_trl(
    model: Any, server: RolloutServer, prompts: list[list[int]], steps: int, rows: list[Row]
) -> None:
    """TRL's GRPO trainer, which takes rollouts from a function."""
    import datasets
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)

    def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer(one, add_special_tokens=False)["input_ids"] for one in texts]
        rollouts = refit_and_sample(trainer.model, server, ids, rows)
        return {
            "prompt_ids": ids,
            "completion_ids": [one.output_ids for one in rollouts],
            "logprobs": [one.logprobs for one in rollouts],
        }

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        learning_rate=3e-4,
        per_device_train_batch_size=len(prompts),
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    texts = [{"prompt": tokenizer.decode(one)} for one in prompts[::SAMPLES]]
    GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [rewarded(one) / TOKENS for one in completion_ids],
        args=config,
        train_dataset=datasets.Dataset.from_list(texts * steps),
        processing_class=tokenizer,
        rollout_func=rollout,
    ).train()


def main(
    trl: Annotated[bool, typer.Option("--trl", help="with TRL's trainer")] = False,
    steps: Annotated[int, typer.Option(min=1)] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="append a line")] = None,
) -> None:
    """Train a few steps; an error where the model does not compute with what is served."""
    from transformers import AutoModelForCausalLM

    train: Callable[..., None] = with_trl if trl else plain
    recipe = "trl" if trl else "transformers"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(Path(scratch) / "model")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        prompts = [[60 + 7 * n, 70, 80 + n] for n in range(PROMPTS) for _ in range(SAMPLES)]
        with RolloutServer(
            folder,
            ["--dtype=bfloat16"],
            quantized=True,
            options={},
            batch=len(prompts),
            prefill=1024,
            seed=1,
            threads=1,
            log_path=Path(scratch) / "server.log",
        ) as server:
            compute_as_served(model, RefitClient(server.url).plan())
            rows: list[Row] = []
            train(model, server, prompts, steps, rows)
    for row in rows:
        print(recipe, row, flush=True)
    found = measured.versions("sglang", "torch", "transformers", *(["trl"] if trl else []))
    measured.append(
        json_path, [{"benchmark": "train_as_served", "recipe": recipe, "steps": rows}], **found
    )


if __name__ == "__main__":
    typer.run(main)
