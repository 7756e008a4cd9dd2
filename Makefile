# A fresh machine needs make and python3 (3.11 or newer), and bubblewrap for programs that a model wrote; the first target builds .venv, later ones reuse it.
#
#   PYTHON       interpreter the environment is made with
#   TORCH        what pip installs as torch; by default the release of TORCH_RELEASE, for CPU, or plain where nvidia-smi works
#   TORCH_INDEX  where CPU builds are looked for, besides the usual index
#   TEST_JOBS    pytest workers; each computes with one thread
#   BUDGET       seconds of one call of gpu-suite and gpu-first; GPU_PLATFORM is the platform they measure, read off the
#                card unless given
#   TESTS        1 runs the tests marked gpu again before gpu-suite
#   MUTATE       the file or folder that mutate changes, and MUTATE_TESTS the tests that should notice

PYTHON ?= python3
TORCH ?=
# Its triton is the one among the test tools (pyproject.toml).
TORCH_RELEASE := torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

TEST_JOBS ?= 2
BUDGET ?= 520
GPU_PLATFORM ?=
TESTS ?=
MUTATE ?= engines/laps/system.py
MUTATE_TESTS ?= tests/engines/laps

# Figures are modules that have a FIGURE.
figures_in = $(subst _,-,$(patsubst paper_figures/$(1)/%.py,%,$(sort $(shell grep -l '^FIGURE = ' paper_figures/$(1)/*.py))))
FIGURES := $(call figures_in,dllm_serve)
AMPD_FIGURES := $(call figures_in,ampd)
BLOCK_FIGURES := $(call figures_in,block)
LAPS_FIGURES := $(call figures_in,laps)

VENV := .venv
EXTRAS := .venv-extras
CLIENTS := .venv-clients
EXTRA_TESTS := tests/engines/models/test_chat.py tests/engines/models/test_causal_config.py tests/repro/cli/test_generate.py tests/repro/cli/test_serve.py tests/repro/tasks/test_grading.py tests/repro/test_lm_eval.py tests/repro/test_serving_ar.py tests/properties/test_site.py
STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
# What is imported is compiled then: all that is installed would take as long as installing it.
INSTALL := $(BIN)/python -m pip -qq --disable-pip-version-check install --no-compile
SAY := @printf '%s\n'

.DEFAULT_GOAL := help
# Measured runs must not disturb each other.
.NOTPARALLEL:
.PHONY: help setup reproduce-all reproduce-ampd reproduce-laps reproduce-block $(FIGURES:%=reproduce-%) $(AMPD_FIGURES:%=reproduce-ampd-%) $(LAPS_FIGURES:%=reproduce-laps-%) $(BLOCK_FIGURES:%=reproduce-block-%) check-results docs lock test test-extras test-clients lint check mutate gpu-suite gpu-first clean

help:
	$(SAY) 'make setup           build .venv with everything (2-5 minutes, about 2.5 GB)' \
	  'make reproduce-fig3  run and draw dLLM-Serve Figure 3 into results/figures/dllm-serve; any other likewise' \
	  '                     (3 to 5 simulate one sample of 500 requests: repro reproduce fig3 takes five whole ones)' \
	  'make reproduce-ampd-fig4  simulate and draw AMPD Figure 4: 6,000 runs, some six minutes on two cores' \
	  'make reproduce-ampd  every figure of AMPD, some eleven minutes: $(AMPD_FIGURES)' \
	  'make reproduce-laps-fig6  simulate and draw LAPS Figure 6; any other likewise' \
  'make reproduce-laps  every figure of LAPS, some fifteen minutes: $(LAPS_FIGURES)' \
  'make reproduce-block  block diffusion, a minute: $(BLOCK_FIGURES)' \
  'make reproduce-all   every figure there is: $(FIGURES), and those of AMPD, LAPS and block diffusion' \
  '                     (about an hour; the runs of AMPD and LAPS take 0.1 GB in 20,000 files below results/local)' \
	  'make check-results   whether committed figures and verdicts come out of the committed tables of runs, byte for byte' \
	  'make docs            these pages as a site, in build/site (half a minute)' \
	  'make lock            write requirements.lock from $(VENV), which Dockerfile installs' \
	  'make test            the tests' \
	  'make test-extras     the tests that need lm-eval, transformers, datasets and mkdocs, in $(EXTRAS)' \
	  'make test-clients    real clients (openai, GuideLLM, AIPerf, lm-eval, vLLM) against repro serve, in $(CLIENTS)' \
  'make lint            ruff, format check, mypy' \
	  'make check           lint and test' \
	  'make mutate          whether $(MUTATE_TESTS) notices small changes of $(MUTATE): seconds a change, no part of check' \
	  'make gpu-first       the first stages of gpu-suite alone, and a verdict: correct, fast, calibrated' \
	  'make gpu-suite       tests and measurements on a CUDA device, $(BUDGET) s a call, or what is missing for them' \
	  'make clean           remove .venv, caches and build files; results stay' \
	  'Every target but help and clean runs setup first where needed.'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) is not installed: install Python 3.11 or newer, or give PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) -V 2>&1), too old: install Python 3.11 or newer, or give PYTHON=/path/to/python" >&2; exit 1; }
	$(SAY) 'setup: making $(VENV) (a few seconds)'
	@$(PYTHON) -m venv $(VENV) || { echo '$(PYTHON) cannot make $(VENV): install its venv module (Debian, Ubuntu: apt install python3-venv)' >&2; exit 1; }
	@if $(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then \
	  echo 'setup: torch is there'; \
	elif [ -n '$(TORCH)' ]; then \
	  echo 'setup: installing $(TORCH) (1-5 minutes)'; $(INSTALL) '$(TORCH)'; \
	elif nvidia-smi >/dev/null 2>&1; then \
	  echo 'setup: NVIDIA GPU found, installing torch with CUDA (2-10 minutes, several GB)'; $(INSTALL) '$(TORCH_RELEASE)'; \
	else \
	  echo 'setup: installing $(TORCH_RELEASE) for CPU (1-3 minutes)'; \
	  $(INSTALL) --retries 1 --no-deps --extra-index-url '$(TORCH_INDEX)' '$(TORCH_RELEASE)'; \
	fi
	$(SAY) 'setup: installing this package and its tools (1-2 minutes)'
	@$(INSTALL) -e '.[dev]'
	@touch $@
	@command -v bwrap >/dev/null || echo 'setup: programs that a model wrote are not graded without bubblewrap (Debian, Ubuntu: apt install bubblewrap)'
	$(SAY) 'setup: done'

# The figures that were asked for, of which each says which it is.
OWN_TARGETS := $(FIGURES:%=reproduce-%)
SHORT := $(filter reproduce-fig3 reproduce-fig4 reproduce-fig5,$(OWN_TARGETS))
DOING = $${REPRO_PROGRESS:+$$REPRO_PROGRESS, }reproduce $*: minutes on a CPU; what is already stored is not run again
AMPD_TARGETS := $(AMPD_FIGURES:%=reproduce-ampd-%)
LAPS_TARGETS := $(LAPS_FIGURES:%=reproduce-laps-%)
BLOCK_TARGETS := $(BLOCK_FIGURES:%=reproduce-block-%)
OF_reproduce-all := $(OWN_TARGETS) $(AMPD_TARGETS) $(LAPS_TARGETS) $(BLOCK_TARGETS)
OF_reproduce-block := $(BLOCK_TARGETS)
OF_reproduce-ampd := $(AMPD_TARGETS)
OF_reproduce-laps := $(LAPS_TARGETS)
ASKED := $(foreach goal,$(filter reproduce-%,$(MAKECMDGOALS)),$(or $(OF_$(goal)),$(goal)))
export REPRO_PROGRESS = $(if $(word 2,$(ASKED)),$(shell printf '%s\n' $(ASKED) | grep -nxm1 '$@' | sed 's/:.*//;s/.*/figure & of $(words $(ASKED))/'))

# Static patterns, so that a figure is one word in FIGURES.
$(filter-out $(SHORT),$(OWN_TARGETS)): reproduce-%: $(STAMP)
	$(SAY) "$(DOING)"
	@$(BIN)/repro reproduce $*

# Five simulated samples of 2,000 requests would take longer than all that is measured: one of 500 is drawn, as its caption says.
$(SHORT): reproduce-%: $(STAMP)
	$(SAY) "$(DOING)"
	@$(BIN)/repro reproduce $* --platform cpu-tiny
	@$(BIN)/repro reproduce $* --platform rtx4090 --num-runs 1 --num-prompts 500

$(AMPD_FIGURES:%=reproduce-ampd-%): reproduce-ampd-%: $(STAMP)
	$(SAY) "$${REPRO_PROGRESS:+$$REPRO_PROGRESS, }reproduce ampd/$*: simulated, on all cores; what is already stored is not run again"
	@$(BIN)/repro reproduce ampd/$*

reproduce-ampd: $(AMPD_FIGURES:%=reproduce-ampd-%)

$(LAPS_FIGURES:%=reproduce-laps-%): reproduce-laps-%: $(STAMP)
	$(SAY) "$${REPRO_PROGRESS:+$$REPRO_PROGRESS, }reproduce laps/$*: simulated, on all cores; what is already stored is not run again"
	@$(BIN)/repro reproduce laps/$*

reproduce-laps: $(LAPS_FIGURES:%=reproduce-laps-%)

$(BLOCK_TARGETS): reproduce-block-%: $(STAMP)
	$(SAY) "$${REPRO_PROGRESS:+$$REPRO_PROGRESS, }reproduce block/$*: simulated, on all cores; what is already stored is not run again"
	@$(BIN)/repro reproduce block/$*

reproduce-block: $(BLOCK_TARGETS)

reproduce-all: $(FIGURES:%=reproduce-%) reproduce-ampd reproduce-laps reproduce-block

check-results: $(STAMP)
	$(SAY) 'check-results: every figure and verdict again from the committed tables of runs (under a minute of one core)'
	@$(BIN)/repro check-results

docs: $(STAMP)
	@$(BIN)/python -c 'import material' 2>/dev/null || $(INSTALL) -e '.[docs]'
	$(SAY) 'docs: every page and the reference, links checked, into build/site/index.html (under half a minute)'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

# The heading stays; releases for CPU have no mark of their own.
lock: $(STAMP)
	@{ sed -n '/^#/p' requirements.lock; $(BIN)/python -m pip --disable-pip-version-check freeze --all --exclude-editable | sed 's/+cpu$$//; /^pip==/d'; } > requirements.lock.new
	@mv requirements.lock.new requirements.lock

# Tests start some hundred interpreters: what one has compiled, the next ones read.
test: $(STAMP)
	$(SAY) 'test: $(TEST_JOBS) workers (a few minutes)'
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

# Its own environment, on top of the other: what is installed there is not installed twice.
test-extras: $(STAMP)
	$(SAY) 'test-extras: lm-eval, transformers, datasets and mkdocs in $(EXTRAS), and the tests that need them (1-3 minutes)'
	@test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" > "$$($(EXTRAS)/bin/python -c "$$site")/setup.pth"
	@$(EXTRAS)/bin/python -m pip -qq --disable-pip-version-check install -e '.[eval,hub,docs]'
	@PYTHONDONTWRITEBYTECODE= $(EXTRAS)/bin/python -m pytest -n $(TEST_JOBS) $(EXTRA_TESTS)

# Programs of other projects, pinned, against repro serve; beside vLLM too where .venv-vllm is there (repro install vllm).
test-clients: $(STAMP)
	$(SAY) 'test-clients: the clients of tests/clients/requirements.txt in $(CLIENTS), each against repro serve (5-15 minutes)'
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -c 'import torch' 2>/dev/null || $(CLIENTS)/bin/python -m pip -qq --disable-pip-version-check install --retries 1 --extra-index-url '$(TORCH_INDEX)' '$(TORCH_RELEASE)'
	@$(CLIENTS)/bin/python -m pip -qq --disable-pip-version-check install -r tests/clients/requirements.txt
	@REPRO_PYTHON=$(CURDIR)/$(BIN)/python PYTHONPATH=$(CURDIR) $(CLIENTS)/bin/python -m pytest tests/clients -s

lint: $(STAMP)
	$(SAY) 'lint: ruff check, ruff format --check, mypy (under a minute)'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

check: lint test

# In a clone of the commit that is checked out: cosmic-ray changes files where they lie.
MUTATED := build/mutate
RAY = PATH=$(CURDIR)/$(BIN):$$PATH PYTHONPATH=$(CURDIR)/$(MUTATED) OMP_NUM_THREADS=1

mutate: $(STAMP)
	@$(INSTALL) -e '.[mutation]'
	@rm -rf $(MUTATED); git clone -q --shared . $(MUTATED)
	@sed -i 's|MODULE|$(MUTATE)|; s|TESTS|$(MUTATE_TESTS)|' $(MUTATED)/cosmic-ray.toml
	$(SAY) 'mutate: small changes of $(MUTATE), one at a time, each run through $(MUTATE_TESTS)'
	@cd $(MUTATED) && export $(RAY) && cosmic-ray baseline cosmic-ray.toml && cosmic-ray init cosmic-ray.toml session.sqlite \
	  && cr-filter-operators session.sqlite cosmic-ray.toml && cosmic-ray exec cosmic-ray.toml session.sqlite \
	  && cr-report --surviving-only --show-diff session.sqlite && cr-rate session.sqlite

# Where torch with CUDA and the rest are there already nothing is installed: many such machines have no network.
HAS_ALL = $(PYTHON) -c 'import torch, numpy, pandas, matplotlib, seaborn, typer, rich, yaml, safetensors, tokenizers, pytest; assert torch.cuda.is_available()'
GPU_SUITE = repro gpu-suite $(if $(GPU_PLATFORM),--platform $(GPU_PLATFORM)) --budget $(BUDGET)
GPU_READY = [ -e $(STAMP) ] || $(HAS_ALL) 2>/dev/null || $(MAKE) --no-print-directory setup
ON_GPU = py=$(PYTHON); [ ! -e $(STAMP) ] || py=$(BIN)/python; $$py -m

gpu-suite:
	@$(GPU_READY)
	@if [ -n '$(TESTS)' ]; then echo 'gpu-suite: the tests marked gpu, again'; $(ON_GPU) pytest -m gpu -n 0; fi
	$(SAY) 'gpu-suite: up to $(BUDGET) s; the same command goes on where this one stops'
	@$(ON_GPU) $(GPU_SUITE)

gpu-first:
	@$(GPU_READY)
	$(SAY) 'gpu-first: up to $(BUDGET) s; the same command goes on where this one stops'
	@$(ON_GPU) $(GPU_SUITE) --first

clean:
	$(SAY) 'clean: removing $(VENV), $(EXTRAS), caches and build files; results stay'
	@rm -rf $(VENV) $(EXTRAS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@for folder in baselines engines paper_figures repro tests; do find $$folder -name __pycache__ -type d -prune -exec rm -rf {} +; done
