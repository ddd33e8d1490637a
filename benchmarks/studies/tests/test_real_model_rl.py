"""RL on a pretrained model: its task, the trainer's log-probabilities, and what TIS changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from studies.real_model.rl_policy import trained_policy
from studies.real_model.sums import EXAMPLES, draw_sums, make_sum

from sglang_fp8rl.lab.eval.gap import load_model, rescore
from sglang_fp8rl.lab.eval.server import Rollout
from sglang_fp8rl.lab.testing.checkpoints import (
    make_config,
    make_state_dict,
    save_checkpoint,
)

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
RESPONSES = [[13, 14], [15, 16, 17, 18], [19]]


def encode(text):
    return [ord(character) for character in text]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = make_config("llama", num_hidden_layers=3, vocab_size=128, tie_word_embeddings=True)
    state = make_state_dict(config, seed=0)
    return save_checkpoint(tmp_path_factory.mktemp("model"), config, state)


def test_an_answer_is_the_sum_and_the_end_of_its_line():
    problem = make_sum(7, 15, encode)
    assert problem.prompt == encode(f"{EXAMPLES}7+15=")
    assert problem.answer == encode("22\n")


def test_validation_never_sees_a_sum_of_training():
    seen = [
        {(p.one, p.other) for p in draw_sums(random.Random(0), 300, encode, held_out=held_out)}
        for held_out in (False, True)
    ]
    assert not seen[0] & seen[1]
    assert len(seen[1]) > 40


def test_the_trainers_logprobs_are_those_of_each_answer_alone(checkpoint):
    found, mask = trained_policy(checkpoint, 0, None).logprobs(PROMPTS, RESPONSES)
    alone = load_model(str(checkpoint), "bfloat16", "cpu")
    rollouts = [Rollout(p, r, []) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for row, kept, expected in zip(found, mask, rescore(alone, rollouts), strict=True):
        assert int(kept.sum()) == len(expected)
        torch.testing.assert_close(row[: len(expected)], expected, atol=0.03, rtol=0)
        assert not row[len(expected) :].any()


def test_what_is_in_front_of_the_trained_layers_is_kept_and_gives_the_same(checkpoint):
    whole = trained_policy(checkpoint, 0, None)
    policy = trained_policy(checkpoint, 0, 1)
    for count in (3, 2, 3):  # a shorter batch in between, and one that was seen
        expected, _ = whole.logprobs(PROMPTS[:count], RESPONSES[:count])
        found, _ = policy.logprobs(PROMPTS[:count], RESPONSES[:count])
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0)
    with torch.no_grad():
        for model in (whole, policy):
            model.masters["model.layers.2.self_attn.q_proj.weight"].mul_(-1.5)
    before = expected
    expected, _ = whole.logprobs(PROMPTS, RESPONSES)
    found, _ = policy.logprobs(PROMPTS, RESPONSES)
    assert (expected - before).abs().max() > 0.05
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_only_the_last_layers_are_trained_where_so_many_are_asked_for(checkpoint):
    policy = trained_policy(checkpoint, 0, 1)
    logprobs, _ = policy.logprobs(PROMPTS, RESPONSES)
    logprobs.sum().backward()
    trained = {name for name, weight in policy.masters.items() if weight.grad is not None}
    assert trained == {name for name in policy.masters if ".layers.2." in name}


@pytest.mark.slow  # imports veRL
def test_without_tis_an_update_does_not_depend_on_the_rollouts_logprobs(checkpoint):
    from small_dapo.dapo import Dapo
    from small_dapo.rollout import Group
    from small_dapo.settings import Settings

    problems = [make_sum(1, 2, lambda text: [ord(c) % 100 for c in text]) for _ in range(2)]

    def updated(cap, rollout_logprob):
        policy = trained_policy(checkpoint, 0, None)
        settings = replace(Settings(), tis_cap=cap, warmup_updates=1, learning_rate=1e-3)
        groups = [
            Group(p, [p.answer, [5, 6]], [[rollout_logprob] * 2, [rollout_logprob] * 2])
            for p in problems
        ]
        Dapo(policy, settings).update(groups)
        return torch.cat([weight.detach().flatten() for weight in policy.masters.values()])

    assert torch.equal(updated(None, -1.0), updated(None, -9.0))
    assert not torch.equal(updated(2.0, -5.0), updated(2.0, -9.0))
