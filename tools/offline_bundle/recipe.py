"""What goes into the bundle and what stays out, with the reason. Data; selection.py applies it.

Every pin of `constraints/oldest.txt` is in exactly one of TAKEN, HOST and LEFT_OUT; a test holds
that, so a new pin has to be decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from .selection import Drop
from .staging import Edit

SGLANG = "0.5.16"

PLUGIN = "sglang-fp8rl"

# Installed without its requirements everywhere, so no constraints file has it.
UNCONSTRAINED = {"verl": "0.9.1"}

# What serving a text model imports, and the closure of that. By the part of SGLang that wants it.
_TAKEN = {
    "SGLang, its kernels, and headers that its JIT kernels compile against": """
        sglang sglang-kernel sgl-deep-gemm apache-tvm-ffi ninja flashinfer-python
        torch-memory-saver nvidia-ml-py einops dill torchvision pillow
    """,
    "models, tokenizers, checkpoints": """
        transformers tokenizers huggingface-hub safetensors regex pyyaml numpy sentencepiece
        compressed-tensors loguru gguf filelock fsspec packaging tqdm tiktoken
    """,
    "server and its API": """
        fastapi starlette uvicorn uvloop h11 anyio sniffio idna annotated-doc opentelemetry-api
        python-multipart aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl
        httpx httpcore certifi openai jiter distro openai-harmony pydantic pydantic-core
        annotated-types typing-inspection typing-extensions pybase64 orjson msgspec pyzmq psutil
        setproctitle prometheus-client watchfiles zstandard soundfile cffi pycparser requests
        urllib3 charset-normalizer jsonschema jsonschema-specifications referencing rpds-py
        partial-json-parser
    """,
    "structured output (xgrammar is SGLang's default)": "xgrammar",
    "sglang.utils imports IPython.display": "ipython traitlets pygments",
    "this plugin's commands": "typer rich shellingham markdown-it-py mdurl click",
    "jinja for chat templates": "jinja2 markupsafe",
    "what `make bench-gpu` compares with": "torchao verl",
    "SGLang's benchmark of decoding": "tabulate",
}

HOST_REASON = "the host's: torch and Triton with what they install"
_HOST = """
    torch triton cuda-toolkit cuda-bindings cuda-pathfinder nvidia-cublas nvidia-cuda-cupti
    nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand
    nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink
    nvidia-nvshmem-cu13 nvidia-nvtx networkx sympy mpmath setuptools
"""

_LEFT_OUT = {
    "CUDA's compiler: JIT kernels need nvcc 13 from the host": """
        nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl nvidia-cuda-nvdisasm
    """,
    "kernels of other attention or expert backends, written in CuTe or TileLang": """
        flash-attn-4 quack-kernels nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base
        nvidia-cutlass-dsl-libs-core nvidia-cutlass-dsl-libs-cu12 nvidia-cutlass-dsl-libs-cu13
        cuda-tile nvidia-cudnn-frontend nvidia-mathdx tilelang z3-solver humming-kernels helion
        filecheck tokenspeed-mla tokenspeed-triton kernels kernels-data tomlkit cuda-python
        cuda-core ml-dtypes pyelftools
    """,
    "numba, of the CPU casts: an LLVM of 150 MB, and no part of serving on a GPU": """
        numba llvmlite
    """,
    "images, sound and video": "torchaudio torchcodec timm easydict mistral-common pydantic-extra-types",
    "other structured-output backends": """
        outlines outlines-core interegular cloudpickle llguidance airportsdata pycountry diskcache lark nest-asyncio
    """,
    "other ways into the server": """
        grpcio grpcio-health-checking grpcio-reflection smg-grpc-proto smg-grpc-servicer protobuf
        anthropic docstring-parser ray httpx2 httpcore2 truststore
    """,
    "torch 2.11 hands tensors over by itself": "torch-c-dlpack-ext",
    "downloads: there is no network": """
        hf-xet modelscope modelscope-hub blobfile lxml pycryptodomex cryptography
    """,
    "data sets, 30 MiB: SGLang's benchmark imports them unasked, and finds stand_ins/datasets.py": """
        datasets pandas pyarrow multiprocess xxhash python-dateutil six
    """,
    "evaluation": """
        scipy math-verify latex2sympy2-extended antlr4-python3-runtime sortedcontainers
    """,
    "Inspect, which asks the questions of an evaluation": """
        aioboto3 aiobotocore aiofiles aioitertools beautifulsoup4 boto3 botocore debugpy
        frozendict ijson inspect-ai jmespath jsonlines jsonpatch jsonpath-ng jsonpointer
        jsonref linkify-it-py mdit-py-plugins mmh3 pathlib-abc pebble platformdirs
        python-dotenv s3fs s3transfer semver shortuuid soupsieve tenacity textual
        universal-pathlib wrapt zipp
    """,
    "the trainer (veRL)": """
        hydra-core omegaconf codetiming tensordict accelerate peft pyvers msgpack transferqueue
        torchdata pylatexenc tensorboard tensorboard-data-server absl-py markdown werkzeug
        cachetools
    """,
    "what Ray starts beside itself": """
        aiohttp-cors colorful distlib google-api-core google-auth googleapis-common-protos opencensus
        opencensus-context opentelemetry-exporter-prometheus opentelemetry-proto opentelemetry-sdk
        opentelemetry-semantic-conventions proto-plus pyasn1 pyasn1-modules python-discovery
        smart-open virtualenv
    """,
    "another trainer's client (AReaL)": """
        colorlog flask blinker itsdangerous
    """,
    "IPython's prompt, which nobody sees": """
        ipython-pygments-lexers prompt-toolkit wcwidth stack-data executing asttokens pure-eval
        matplotlib-inline pexpect ptyprocess parso jedi
    """,
    "tests, plots, development": """
        pytest pytest-timeout pytest-xdist execnet import-linter grimp pluggy iniconfig hypothesis ruff mypy mypy-extensions librt pathspec
        types-requests ast-serialize matplotlib contourpy cycler fonttools kiwisolver pyparsing
        build pyproject-hooks py-spy
    """,
}


def _names(groups: dict[str, str]) -> dict[str, str]:
    return {name: why for why, names in groups.items() for name in names.split()}


TAKEN: dict[str, str] = _names(_TAKEN)
LEFT_OUT: dict[str, str] = _names(_LEFT_OUT) | dict.fromkeys(_HOST.split(), HOST_REASON)

DROPS: tuple[Drop, ...] = (
    Drop("sglang-kernel", "sgl_kernel/flash_ops.*", "FlashAttention-3"),
    Drop("sglang-kernel", "sgl_kernel/flashmla_ops.*", "FlashMLA"),
    Drop("sglang-kernel", "sgl_kernel/infllm_ops.*", "InfLLM"),
    Drop("sglang-kernel", "sgl_kernel/sm100/*", "the build for everything but Hopper"),
    Drop("sglang-kernel", "sgl_kernel/spatial_ops.*", "green contexts (PD multiplexing)"),
    Drop("sglang", "sglang/multimodal_gen/*", "image and video generation"),
    Drop("sglang", "sglang/srt/grpc/*.so", "gRPC server"),
    Drop("sglang", "sglang/srt/multimodal/*.so", "image preprocessing"),
    Drop("sglang", "sglang/jit_kernel/diffusion/*", "image and video generation"),
    Drop("sglang", "sglang/jit_kernel/tests/*", "tests"),
    Drop("sglang", "sglang/jit_kernel/benchmark/*", "benchmarks"),
    Drop("pillow", "PIL/_avif.*", "AVIF images"),
    Drop("pillow", "pillow.libs/libavif-*", "AVIF images"),
    Drop("flashinfer-python", "flashinfer/data/*", "sources: its kernels are not compiled here"),
    Drop("torchao", "torchao/*.so", "kernels that no benchmark calls"),
    Drop("verl", "verl/*", "a trainer; its cast is one file, which needs none of the rest"),
    Drop("numpy", "numpy/*/tests/*", "tests"),
    Drop("*", "bin/*", "commands: the host's interpreter starts modules instead"),
    Drop("*", "*/__pycache__/*", "bytecode: made where it is unpacked"),
    Drop("*", "*.pyi", "type stubs"),
    Drop("*", "*.pyx", "sources of what is compiled"),
    Drop("*", "*.pxd", "sources of what is compiled"),
    Drop("*", "*.a", "static libraries"),
    Drop("*", "share/man/*", "manual pages"),
)

# Without FlashInfer's sources its norms and samplers can't be compiled. Where they can't be imported, sgl_kernel
# launches its own, which it ships; of an import that works it takes them without asking SGLang's switch.
EDITS: tuple[Edit, ...] = tuple(
    Edit(
        f"sgl_kernel/{file}.py",
        f"import flashinfer.{module} as _flashinfer_{module}",
        'raise ImportError("the sources of its kernels are not in this bundle")',
    )
    for file, module in (("elementwise", "norm"), ("sampling", "sampling"))
)

# What no rule may drop, by distribution: without these nothing starts.
KEEP: dict[str, tuple[str, ...]] = {
    "sglang-kernel": ("sgl_kernel/sm90/common_ops.*", "sgl_kernel/__init__.py"),
    "ninja": ("bin/ninja",),
    "apache-tvm-ffi": ("tvm_ffi/lib/*.so", "tvm_ffi/include/*"),
    "sglang": ("sglang/jit_kernel/csrc/*", "sglang/launch_server.py"),
    "verl": ("verl/utils/kernel/fp8_kernel.py",),
    "sgl-deep-gemm": ("deep_gemm/_C*", "deep_gemm/include/deep_gemm/*"),
}


def pinned(names: Iterable[str], pins: dict[str, str]) -> list[str]:
    """`name==version` of each, sorted."""
    return [f"{name}=={pins[name]}" for name in sorted(names)]
