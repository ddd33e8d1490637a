"""slime or miles with its rollout in FP8: their own `train.py`, in processes that know this package's method.

    python docs/recipes/slime_miles.py slime train.py --hf-checkpoint MODEL … YOUR FLAGS
    python docs/recipes/slime_miles.py miles train.py --hf-checkpoint MODEL … YOUR FLAGS

Both take every flag of SGLang with `--sglang-` in front; this adds `--sglang-quantization fp8_blockwise_online`.
They build SGLang's parser and its `ServerArgs` in processes of their own, which load no plugins: the flag alone is
refused ("invalid choice"). So plugins are loaded here, before `train.py` is run, and by Ray in each of its
workers. With `ray job submit` give that program as the job's entry point.

No quantizer of the trainer's: both take theirs from `quantization_config` in `config.json` of `--hf-checkpoint`, so
it has to have none. Options of the method go to the servers alone:
`--sglang-json-model-override-args '{"quantization_config": {"misaligned": "bf16"}}'`.

Tried with SGLang 0.5.23 on a CPU: this file with a program that parses as theirs do and asks an actor of Ray's; the
parser and the sender of miles-rl 0.0.2. Not tried: slime and miles themselves, which need Megatron and a GPU.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

from needs import THIS_PACKAGE, need

PLUGINS = "sglang.srt.plugins.load_plugins"
METHOD = ["--sglang-quantization", "fp8_blockwise_online"]
# miles' wheel on the registry (miles-rl 0.0.2) has a copy of SGLang in it, which overwrites yours.
INSTALL = "{} from a checkout of its repository, without dependencies (not the registry's wheel)"


def check_checkpoint(arguments: list[str]) -> None:
    """Leave where the trainer would quantize before it sends."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", type=Path)
    model = parser.parse_known_args(arguments)[0].hf_checkpoint
    if model is None:
        raise SystemExit("error: --hf-checkpoint MODEL is missing")
    config = model / "config.json"
    if config.is_file() and json.loads(config.read_text()).get("quantization_config"):
        raise SystemExit(
            f"error: {config} has a quantization_config, by which the trainer would quantize before it sends. "
            "Give a BF16 checkpoint; options of the method go to --sglang-json-model-override-args."
        )


def main(arguments: list[str]) -> None:
    """Run the trainer's own program, with the method's flag added."""
    if len(arguments) < 2 or arguments[0] not in ("slime", "miles"):
        raise SystemExit("usage: slime_miles.py slime|miles train.py --hf-checkpoint MODEL …")
    trainer, program, *flags = arguments
    need("sglang_fp8rl", THIS_PACKAGE)
    need(trainer, INSTALL.format(trainer))
    asked = [flag for flag in flags if flag.partition("=")[0] == METHOD[0]]
    if asked:
        raise SystemExit(f"error: {asked[0]}: this adds {' '.join(METHOD)}; leave yours out")
    check_checkpoint(flags)
    import ray
    from sglang.srt.plugins import load_plugins

    load_plugins()
    ray.init(runtime_env={"worker_process_setup_hook": PLUGINS})
    sys.argv = [program, *flags, *METHOD]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
