# `make train` and `make test` work on a fresh clone with Python 3.11+ and nothing else.
PYTHON ?= python3
BIN := .venv/bin
DATA ?= data
FAST := not slow and not campaign and not gpu and not timing
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/surefoot/__init__.py)
WORKERS := -n 2 --dist loadfile
export PYTHONDONTWRITEBYTECODE :=  # else each of the hundreds of processes that tests start would compile the package again

.PHONY: train check site test test-cost test-slow test-timing gpu campaign campaign-restarts campaign-ranks campaign-streams campaign-diagnose campaign-mutants campaign-finetune bench bench-compare notebook pictures measure prose sentences release clean

train: .venv/train  ## install the core and the tokenizers, then train a GPT on the source of Python's own standard library
	$(BIN)/surefoot train gpt --run-dir runs/first

check: .venv/ready  ## format, lint, types, import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: .venv/ready  ## the fast suite; DATA=DIRECTORY holds the data sets that some tests read (data/ by default)
	DATA="$(DATA)" $(BIN)/python -m pytest $(WORKERS) -m "$(FAST)"

test-cost: .venv/ready  ## the fast suite, then its CPU seconds over all processes and the ten dearest files
	DATA="$(DATA)" $(BIN)/python tests/cost.py $(WORKERS) -m "$(FAST)"

test-slow: .venv/ready  ## what docs/testing.md lists: long trainings, many more cases of each law
	DATA="$(DATA)" $(BIN)/python -m pytest $(WORKERS) -m "slow and not campaign and not timing"

test-timing: .venv/ready  ## what measures time, one test after the other: give it a machine that does nothing else
	DATA="$(DATA)" $(BIN)/python -m pytest -m "timing and not campaign"

gpu:  ## every claim that needs a GPU, in under ten minutes; DEVICE=cpu runs each line in a tiny size
	benchmarks/gpu.sh

campaign: .venv/ready  ## 200 kills; appends to benchmarks/results and goes on where it stopped
	$(BIN)/python benchmarks/kills.py --kills 200

campaign-restarts: .venv/ready  ## 20 runs of several ranks, killed and stopped; appends likewise
	$(BIN)/python benchmarks/restarts.py --tries 20

campaign-ranks: .venv/ready  ## one hash on 1, 2, 3, 4 and 8 ranks in every cell, and chains of kills between; appends its result
	$(BIN)/python benchmarks/ranks_campaign.py --write

campaign-streams: .venv/ready  ## sources that fork, raise, hang, exit, die and change; at most ten minutes; appends its result
	$(BIN)/python benchmarks/streams_campaign.py --tries 40 --seconds 600 --write

campaign-diagnose: .venv/ready  ## short runs with planted faults, each of which must be found; appends likewise
	$(BIN)/python benchmarks/planted_faults.py

campaign-changes: .venv/ready  ## 300 random histories of changes, skipped steps, going back and kills, each with the bits of its journal in force; appends its result
	$(BIN)/python benchmarks/changes_campaign.py --write

campaign-mutants: .venv/ready  ## 140 small faults in the source, one by one, each of which a test must find; 15 minutes
	$(BIN)/python benchmarks/mutants.py

campaign-finetune: .venv/ready  ## 100 kills of fine-tuning runs, with LoRA and in full; appends likewise
	$(BIN)/python benchmarks/finetune_kills.py --kills 100

bench: .venv/ready  ## every benchmark in its short form, about 15 minutes; DATA=DIRECTORY holds the data sets of some
	$(BIN)/python benchmarks/bench.py $(if $(wildcard $(DATA)),--data $(DATA))

bench-compare: .venv/ready  ## how often `surefoot compare` calls luck better or worse; six minutes; appends its result; needs DATA=DIRECTORY
	$(BIN)/python benchmarks/comparisons.py --data "$(DATA)/fashion-mnist"

measure: .venv/ready  ## size of the source, how much one statement holds, how closely its parts are tied; ARGS="--list chains"
	$(BIN)/python docs/measure.py $(ARGS)

prose:  ## sentences of README, docs, help, docstrings and messages: how long they are, turns to avoid; ARGS="--worst 40", "--draw 100"
	$(PYTHON) docs/prose.py $(ARGS)

sentences: .venv/ready  ## write the sentences of console, page, help, packages and errors into their files, which tests and reviews read
	PYTHONPATH=tests $(BIN)/python tests/texts/written.py
	$(BIN)/python docs/write_errors.py

site: .venv/ready  ## the documentation as a site in site/: strict, every link checked, read without a network
	$(BIN)/python docs/build_site.py

notebook: .venv/ready  ## run the cells of examples/notebook.ipynb and write their outputs into it
	$(BIN)/python docs/run_notebook.py

pictures: .venv/ready  ## every picture of README and docs, from runs made for it; ONLY="resumed report" makes these alone
	PATH="$(CURDIR)/$(BIN):$$PATH" DATA="$(abspath $(DATA))" benchmarks/pictures.sh $(ONLY)

release: .venv/ready  ## build the files of a release, check them, try the wheel, then tag it here; docs/releasing.md has the rest
	@status=$$(git status --porcelain --untracked-files=all) && test -z "$$status" || { printf '%s\n' "error: the clone has changes that are not committed" \
	  "  a tag names a commit, and the files would hold more than that commit" "  type: git status" >&2; exit 1; }
	@! git rev-parse --quiet --verify "refs/tags/v$(VERSION)" >/dev/null || { printf '%s\n' "error: the tag v$(VERSION) exists" \
	  "  a version is released once" "  set the next version in src/surefoot/__init__.py: see docs/releasing.md" >&2; exit 1; }
	rm -rf dist
	$(BIN)/python -m build
	SUREFOOT_RELEASE=1 SUREFOOT_DIST="$(CURDIR)/dist" $(BIN)/python -m pytest --exitfirst tests/test_package.py
	git tag --annotate "v$(VERSION)" --message "surefoot $(VERSION)"
	@echo "v$(VERSION) is tagged and nothing is published yet: docs/releasing.md names the two commands that publish it"

# torch first and through the constraints file: a plain `torch` may bring gigabytes of CUDA packages
define install
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(1)]"
endef

# what `make train` needs: the core and the tokenizers
.venv/train: pyproject.toml constraints.txt
	$(call install,text)
	touch $@

# what the checks and tests need; `make train` needs nothing more
.venv/ready: pyproject.toml constraints.txt
	$(call install,dev)
	touch .venv/train $@

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis
