"""Which tokens a server calibrates its KV cache with: the option's, or those of the text that comes with this."""

from __future__ import annotations

from typing import Any

from ...config import Options
from ...errors import ConfigError
from ..kv_scales.calibration import MAX_TOKENS, Calibration
from ..kv_scales.calibration_text import TEXT

_OPTION = "kv_calibration_tokens"


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
