# Everything a fresh clone needs: `make demo`, `make test`. Environments live in .venv and .venv-oldest.
PYTHON ?= python3.11
UV := .uv/bin/uv
export UV_LINK_MODE ?= hardlink
PYTEST_ARGS ?=
# A fresh environment has no bytecode; without it every server start compiles SGLang again (20 s).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest unit lint clean bench bench-guard proof gpu-session gpu-session-1 gpu-session-2 gpu-session-3 gpu-session-4 bench-gpu accuracy accuracy-short offline-bundle

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	$(PYTHON) -m venv .uv && .uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8

.venv/.ready: $(UV) constraints/newest.txt constraints/requirements.txt pyproject.toml
	$(UV) venv --quiet --clear --python $(PYTHON) .venv
	$(UV) pip install --quiet --python .venv/bin/python -c constraints/newest.txt -r constraints/requirements.txt
	$(UV) pip install --quiet --python .venv/bin/python --no-deps verl==0.9.1
	$(UV) pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e .
	@touch $@

.venv-oldest/.ready: $(UV) constraints/oldest.txt constraints/requirements.txt pyproject.toml
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-oldest
	$(UV) pip install --quiet --python .venv-oldest/bin/python -c constraints/oldest.txt -r constraints/requirements.txt
	$(UV) pip install --quiet --python .venv-oldest/bin/python --no-deps verl==0.9.1
	$(UV) pip install --quiet --python .venv-oldest/bin/python --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/.ready  ## serve, refit and check a small model on real parts (ARGS="--model PATH" for yours)
	.venv/bin/sglang-fp8rl demo $(ARGS)

test: .venv/.ready  ## the whole suite on the newest supported SGLang
	.venv/bin/python -m pytest -m "not gpu" $(PYTEST_ARGS)

test-oldest: .venv-oldest/.ready  ## the whole suite on the oldest supported SGLang
	.venv-oldest/bin/python -m pytest -m "not gpu" $(PYTEST_ARGS)

unit: .venv/.ready  ## what needs no server: under two minutes
	.venv/bin/python -m pytest -m "not gpu and not engine" tests/unit $(PYTEST_ARGS)

accuracy: .venv/.ready  ## DAPO on a small model: five arms, three seeds, 60 steps; about an hour
	.venv/bin/python benchmarks/accuracy/dapo_small.py $(ARGS)

accuracy-short: .venv/.ready  ## the same for CI: fails if FP8 does not train as BF16 does
	.venv/bin/python benchmarks/accuracy/dapo_small.py --short $(ARGS)

offline-bundle: .venv/.ready  ## one archive for a GPU host without network, into dist/ (docs/offline.md)
	@.venv/bin/python -m tools.offline_bundle $(ARGS)

bench: .venv/.ready  ## what needs no GPU: C1-C4, refit time and memory, bytes on the wire; minutes
	.venv/bin/python benchmarks/bench_cast_cpu.py --json benchmarks/results/cast_cpu.jsonl
	.venv/bin/python benchmarks/bench_replay.py --json benchmarks/results/replay_cpu.jsonl
	.venv/bin/python benchmarks/bench_refit.py --json benchmarks/results/refit_cpu.jsonl
	.venv/bin/python benchmarks/bench_wire.py
	.venv/bin/python benchmarks/bench_sass.py --json benchmarks/results/sass.jsonl

bench-guard: .venv/.ready  ## the ratios of C1-C4, refit time and memory, with wide margins: for CI
	.venv/bin/python benchmarks/bench_cast_cpu.py --repetitions 5 --guard
	.venv/bin/python benchmarks/bench_replay.py --layers 6 --repetitions 5 --guard
	.venv/bin/python benchmarks/bench_refit.py --repetitions 5 --guard
	.venv/bin/python benchmarks/bench_sass.py --guard

proof: .venv/.ready  ## the GPU's arithmetic in every case there is, on a CPU: half a minute
	.venv/bin/python tests/unit/numerics/packed_quotient.py

# docs/gpu_session.md; GPU_PYTHON is an interpreter that has torch and Triton already: no network needed,
# and the checkout is in front of whatever package is installed.
GPU_PYTHON ?= .venv/bin/python
ON_GPU := PYTHONPATH=$(CURDIR) timeout 420 $(GPU_PYTHON)
RESULTS := benchmarks/results
gpu-session: gpu-session-1 gpu-session-2 gpu-session-3 gpu-session-4  ## the first 25 minutes on a GPU (docs/gpu_session.md)

gpu-session-1:
	$(ON_GPU) -m pytest -m gpu tests/unit/numerics
	$(ON_GPU) benchmarks/bench_gpu.py --json $(RESULTS)/cast_gpu.jsonl
gpu-session-2:
	$(ON_GPU) benchmarks/bench_sass.py --json $(RESULTS)/sass.jsonl
gpu-session-3:
	-$(ON_GPU) -c "from sglang_fp8rl.cli import app; app()" doctor
	$(ON_GPU) benchmarks/bench_gpu_server.py --model qwen3-0.6b --budget-s 380 --json $(RESULTS)/server_gpu.jsonl
gpu-session-4:
	$(ON_GPU) benchmarks/bench_gpu_server.py --model qwen3-8b --budget-s 380 --json $(RESULTS)/server_gpu.jsonl

# Most important first; the servers get what the cast leaves of 520 s, and skip what does not fit.
bench-gpu: .venv/.ready  ## G1-G9, G11, G12 on a GPU, under 9 minutes (no numbers are committed yet; ARGS go to the servers' part)
	@began=$$(date +%s); \
	.venv/bin/python benchmarks/bench_gpu.py --json benchmarks/results/cast_gpu.jsonl || exit $$?; \
	left=$$((520 - $$(date +%s) + began)); [ $$left -gt 0 ] || left=0; \
	.venv/bin/python benchmarks/bench_gpu_server.py --budget-s $$left \
	    --json benchmarks/results/server_gpu.jsonl $(ARGS)

lint: .venv/.ready  ## ruff, mypy and the layers (import-linter)
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

clean:  ## remove the environments and caches
	rm -rf .venv .venv-oldest .uv .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
