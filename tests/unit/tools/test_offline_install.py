"""The archive, installed and imported as on a Hopper host: Python 3.12 with torch and Triton, no numba.

Takes the network, gigabytes and minutes: a part of `make test-all`, where there is such a Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PINS = REPOSITORY / "constraints" / "oldest.txt"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

# What a server of a text model imports on a Hopper GPU, and what this package's own commands do.
_MODULES = """
    sglang sglang.launch_server sglang.srt.entrypoints.http_server sglang.srt.entrypoints.engine
    sglang.srt.managers.scheduler sglang.srt.managers.detokenizer_manager
    sglang.srt.managers.tokenizer_manager sglang.srt.model_executor.model_runner
    sglang.srt.layers.attention.triton_backend sglang.srt.layers.quantization.fp8
    sglang.srt.layers.quantization.fp8_utils sglang.srt.layers.moe.fused_moe_triton
    sglang.srt.layers.moe.moe_runner.deep_gemm sglang.srt.weight_sync.tensor_bucket
    sglang.benchmark.one_batch_server sgl_kernel deep_gemm torchao xgrammar tvm_ffi
    sglang.srt.models.qwen2 sglang.srt.models.qwen3 sglang.srt.models.qwen3_moe
    sglang.srt.models.llama sglang.srt.models.mixtral sglang.srt.models.deepseek_v2
    sglang.srt.models.glm4_moe
    sglang_fp8rl.plugin sglang_fp8rl.lab.cli sglang_fp8rl.engine.refit sglang_fp8rl.engine.host.hooks
    sglang_fp8rl.numerics.triton.table verl.utils.kernel.fp8_kernel
"""

_IMPORT = """
import importlib, sys, types
import torch
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 1
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100", multi_processor_count=132, total_memory=80 << 30,
    warp_size=32, gcnArchName="",
)
failed = []
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed.append(f"{name}: {type(error).__name__}: {error}")
print("\\n".join(failed))
"""


def python312() -> str | None:
    """One that runs: a version manager's shim may be on the path for a version that is not there."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(home.glob("versions/3.12*/bin/python3.12"))
    for one in [*map(str, found), shutil.which("python3.12")]:
        if one and subprocess.run([one, "-c", "import venv"], capture_output=True).returncode == 0:
            return one
    return None


def uv() -> str | None:
    ours = REPOSITORY / ".uv" / "bin" / "uv"
    return str(ours) if ours.exists() else shutil.which("uv")


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, cwd=REPOSITORY,
        env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def driver_without_a_device(folder: Path, site: Path) -> Path:
    """A `libcuda.so.1` with every function that the bundle's libraries are linked with."""
    libraries = [path for path in site.rglob("*.so*") if path.is_file() and not path.is_symlink()]
    undefined = run("nm", "-D", "--undefined-only", *libraries)
    names = sorted(set(re.findall(r" U (cu[A-Z]\w*)$", undefined, re.MULTILINE)))
    assert "cuPointerGetAttribute" in names
    folder.mkdir()
    source = folder / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in names))
    run("gcc", "-shared", "-o", folder / "libcuda.so.1", source)
    return folder


@pytest.mark.skipif(python312() is None or uv() is None, reason="no Python 3.12, or no uv")
def test_all_that_a_hopper_server_imports_is_there_after_install(tmp_path):
    host = tmp_path / "host" / "bin" / "python"
    run(uv(), "venv", "--quiet", "--python", python312(), tmp_path / "host")
    pins = ("torch", "triton", "setuptools", "numpy")
    run(uv(), "pip", "install", "--quiet", "--python", host, "-c", PINS, *pins)
    build = (sys.executable, "-m", "tools.offline_bundle", "--uv", uv(), "--level", "0")
    run(*build, "--max-mib", "1000", "--output", tmp_path)
    (archive,) = tmp_path.glob("*.tar")
    run("tar", "xf", archive, "-C", (tmp_path / "unpacked").mkdir() or tmp_path / "unpacked")
    folder = tmp_path / "offline"
    run(host, tmp_path / "unpacked" / "install.py", folder, "--no-compile")
    driver = driver_without_a_device(tmp_path / "driver", folder / "site-packages")
    script = tmp_path / "import.py"
    script.write_text(_IMPORT)
    # From a folder that is no checkout: what is imported is the bundle's.
    said = run(
        "sh", "-c", 'cd "$0" && exec "$@"', tmp_path, folder / "bin" / "python", script, *_MODULES.split(),
        LD_LIBRARY_PATH=str(driver), CUDA_VISIBLE_DEVICES="0",  # empty, SGLang's `test_utils` breaks
    )  # fmt: skip
    assert said.strip().splitlines()[-1:] in ([], [""]), said
