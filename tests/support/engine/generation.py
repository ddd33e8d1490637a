"""Greedy generation inside a scheduler (see `engine_host`): its own batching, model and sampler."""

from __future__ import annotations

from array import array
from typing import Any

MAX_STEPS = 100
PROMPT = [5, 6, 7, 8, 9, 10, 11]
NEW_TOKENS = 4


def generate(
    scheduler: Any, prompt: list[int], new_tokens: int, *, may_hit: bool = False
) -> tuple[list[int], list[float]]:
    """Tokens, and the log-probabilities of the prompt's and of theirs. Run on every rank at once.

    The prompt's too: a model may say its next token with certainty, whatever its weights. Not where
    the prompt `may_hit` the prefix cache: SGLang computes anew what it gives log-probabilities of.
    """
    served = submit(scheduler, prompt, new_tokens, log_probabilities_from=-1 if may_hit else 0)
    finish(scheduler)
    assert served.finished(), "no end after so many steps"
    holder = getattr(served, "logprob", served)
    values = [*(holder.input_token_logprobs_val or ()), *holder.output_token_logprobs_val]
    # Nobody predicted the first token.
    return list(served.output_ids), [float(value) for value in values if value is not None]


def submit(
    scheduler: Any, prompt: list[int], new_tokens: int, log_probabilities_from: int = -1
) -> Any:
    """The request, waiting for its first batch. -1: log-probabilities of new tokens alone."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    sampling.verify(scheduler.model_config.vocab_size)
    request = TokenizedGenerateReqInput(
        rid=f"test-{scheduler.forward_ct}",
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=True,
        logprob_start_len=log_probabilities_from,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    scheduler.handle_generate_request(request)
    waiting = scheduler.waiting_queue
    assert len(waiting) == 1, "the request was refused"
    return waiting[0]


def step(scheduler: Any) -> bool:
    """One batch, as the event loop would; whether there was one."""
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch = plan.running_batch
    if plan.batch_to_run is None:
        return False
    scheduler.process_batch_result(plan.batch_to_run, scheduler.run_batch(plan.batch_to_run))
    scheduler.last_batch = plan.batch_to_run
    return True


def finish(scheduler: Any) -> None:
    """Batches until nothing runs."""
    for _ in range(MAX_STEPS):
        if not step(scheduler):
            break
    scheduler.last_batch = None
