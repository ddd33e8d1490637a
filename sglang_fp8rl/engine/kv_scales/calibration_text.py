"""The text that `kv_scales: calibrated` runs, and its tokens, or those that the option names instead."""

from __future__ import annotations

from typing import Any

from ...config import Options
from ...errors import ConfigError
from .calibration import MAX_TOKENS, Calibration

_OPTION = "kv_calibration_tokens"
# Written for it, and in the public domain.
TEXT = """The harbour wakes before the town does. At four in the morning the ice machine starts, and by \
half past there are lights in every boat. Marta counts crates: forty of herring, twelve of cod, and a box \
that nobody ordered. "Leave it," says her brother, "somebody will ask." Nobody asks.

Question: A tank holds 240 litres. One pipe fills it in 6 hours, another empties it in 8. Both are open. \
When is it full? Answer: The first brings 240 / 6 = 40 litres an hour, the second takes 240 / 8 = 30, so \
10 are left, and 240 / 10 = 24 hours. Check: 24 * 40 - 24 * 30 = 960 - 720 = 240.

def longest_run(values):
    best = length = 0
    for before, after in zip(values, values[1:]):
        length = length + 1 if after > before else 0
        best = max(best, length)
    return best + 1 if values else 0

{"id": 7041, "name": "Ostrava", "open": true, "rates": [0.125, -3.5e-4, 1e6], "note": null}

Let f(x) = x^2 - 5x + 6. Then f(x) = (x - 2)(x - 3), so its zeros are x = 2 and x = 3, and as f is a \
parabola that opens upwards its least value lies between them, at x = 5/2, where f(5/2) = -1/4.

Wer früh aufsteht, sieht den Nebel über dem Fluss. Quand il pleut, la route sent la terre. El tren de las \
nueve llega tarde. 今日は風が強い。 Сегодня идёт снег. مرحبا. 12:45, 3/4, $19.99, 50 %, #42, a@b.example

First, write down what is known. Second, say what is asked. Third, look for the step between the two; if \
there is none, cut the question in half and begin again. Wait, that is not yet right: the second half may \
need the first. So number them, and answer them in order. Therefore the result is 128.
"""


def calibration_of(runner: Any, options: Options) -> Calibration:
    """For the model of a `ModelRunner`.

    Raises:
        ConfigError: no tokens to be had, or some that the model does not know.
    """
    from sglang.srt.runtime_context import get_server_args

    size, length = runner.model_config.vocab_size, runner.model_config.context_len
    tokens = options.kv_calibration_tokens or _of_text(get_server_args())
    if max(tokens) >= size or len(tokens) > length:
        raise ConfigError(
            _OPTION,
            f"{len(tokens)} tokens, the largest is {max(tokens)}",
            f"this model has {size} tokens and room for {length} in a sequence",
            "Give ids of this model's tokenizer.",
        )
    return Calibration(runner.model, tokens[:MAX_TOKENS])


def _of_text(args: Any) -> list[int]:
    """By the tokenizer that the server has, or would have without `--skip-tokenizer-init`."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    path = args.tokenizer_path or args.model_path
    try:
        tokenizer = get_tokenizer(
            path,
            tokenizer_mode=args.tokenizer_mode,
            trust_remote_code=args.trust_remote_code,
            revision=args.revision,
        )
        tokens = list(tokenizer.encode(TEXT))
    except (OSError, ValueError, ImportError) as error:
        raise _no_tokens(path, f"no tokenizer ({type(error).__name__})") from error
    if not tokens:  # what transformers makes of a model's config alone has no vocabulary
        raise _no_tokens(path, "a tokenizer that makes no tokens of the text")
    return tokens[:MAX_TOKENS]


def _no_tokens(path: str, value: str) -> ConfigError:
    return ConfigError(
        f"kv_scales 'calibrated', {path}",
        value,
        "the text to calibrate with has to become tokens",
        f"Put the tokenizer beside the model, or give token ids as {_OPTION}.",
    )
