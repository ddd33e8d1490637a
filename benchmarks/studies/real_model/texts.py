"""English that installed packages carry, cut into windows, and the prompts to be answered.

The texts were not chosen for this model. What it was trained on is unknown, so *held out* is too much
to say of them; they are the same for every arm, and only differences between arms are of interest.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from sglang_fp8rl.errors import ConfigError, EvaluationError
from sglang_fp8rl.lab.eval.prompts import prompt_lines

# Name to the file below site-packages and the characters to skip (title pages, lists of editions).
TEXTS = {
    "report": ("sglang/test/long_prompt.txt", 120),  # of the US Congress on commissions, 2018
    "opticks": ("tvm_ffi/3rdparty/libbacktrace/Isaac.Newton-Opticks.txt", 60_000),  # 1718
}
PROMPTS = Path(__file__).parent / "prompts.txt"
_CHARACTERS_PER_TOKEN = 8  # more than any text has, so that enough is cut off


def windows(tokenizer: Any, per_text: int, tokens: int) -> list[list[int]]:
    """`per_text` windows of `tokens` token ids of each text, one behind the other.

    Raises:
        ConfigError: a text is not there, or too short.
    """
    found: list[list[int]] = []
    for name, (path, skip) in TEXTS.items():
        file = Path(sysconfig.get_paths()["purelib"]) / path
        if not file.is_file():
            raise ConfigError(
                f"text {name!r}",
                f"no file {path} among the installed packages",
                "its package carries it (constraints/newest.txt)",
                "Install the environment anew.",
            )
        text = file.read_text(encoding="utf-8").replace("\\n", "\n").replace("\\'", "'")
        part = text[skip : skip + per_text * tokens * _CHARACTERS_PER_TOKEN]
        ids = tokenizer(part, add_special_tokens=False)["input_ids"]
        if len(ids) < per_text * tokens:
            raise ConfigError(
                f"text {name!r}", f"{len(ids)} tokens", f"{per_text} windows of {tokens}", "Fewer."
            )
        found += [ids[n * tokens : (n + 1) * tokens] for n in range(per_text)]
    return found


def prompts(path: Path, tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the file's prompts, one a line, repeated in turn up to `count`.

    Each is a user's turn of the tokenizer's chat template; where it has none, plain text.

    Raises:
        EvaluationError: no such file, no prompt in it, or one that becomes no token.
    """
    encoded = [_encode(where, line, tokenizer) for where, line in prompt_lines(path)]
    return [encoded[number % len(encoded)] for number in range(count)]


def _encode(where: str, line: str, tokenizer: Any) -> list[int]:
    if not tokenizer(line, add_special_tokens=False)["input_ids"]:
        raise EvaluationError(
            where, repr(line), "the tokenizer makes no token of it", "Delete or change the line."
        )
    if tokenizer.chat_template is None:
        return list(tokenizer(line)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": line}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
