# `make demo` and `make test` are all a newcomer needs: each makes .venv, installs what is missing
# and does its job. The second run starts in seconds. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

ACCELERATOR := .venv-accelerator

.PHONY: help demo test test-accelerator lint kernels fuzz benchmark docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## */\t/' | expand -t 20

demo: $(VENV)/.ready  ## decompose a sample smear into stains; the pictures go to demo/
	$(BIN)/napari-beerlanet demo --out demo

test: $(VENV)/.ready  ## lint, types, manifest, then the tests
	@$(MAKE) --no-print-directory -j2 lint kernels
	PYTHONDONTWRITEBYTECODE= sh scripts/with-display.sh $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations 50

test-accelerator: $(ACCELERATOR)/.ready  ## the same numbers on a device that is not the CPU (torch_xla, no GPU)
	PJRT_DEVICE=CPU sh scripts/with-display.sh $(ACCELERATOR)/bin/python -m pytest tests/accelerator --durations 10

lint: $(VENV)/.ready  ## ruff, import contracts, mypy, npe2 validate
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/npe2 validate --imports src/napari_beerlanet/napari.yaml

# What fails here, a test tells better.
kernels: $(VENV)/.ready
	-@PYTHONDONTWRITEBYTECODE= $(BIN)/python tests/compile_kernels.py

FUZZ_SECONDS ?= 120
fuzz: $(VENV)/.ready  ## open thousands of bad files, under limits of memory and time
	$(BIN)/python tests/fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_OPTIONS)

benchmark: $(VENV)/.benchmark-ready  ## speed and memory against the dense version
	$(BIN)/python benchmarks/decompose.py

docs: $(VENV)/.ready  ## the Python reference as web pages in site/
	@sh scripts/environment.sh $(PYTHON) $(VENV) docs
	$(BIN)/pdoc --docformat numpy --math -o site napari_beerlanet

clean:  ## remove .venv, caches and everything the commands wrote
	rm -rf $(VENV) $(ACCELERATOR) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site demo
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# _version.py, too, because the installed version number comes from it.
$(VENV)/.ready: pyproject.toml src/napari_beerlanet/_version.py scripts/environment.sh scripts/system-libraries.sh
	@sh scripts/system-libraries.sh $(PYTHON)
	@sh scripts/environment.sh $(PYTHON) $(VENV) all,test
	@touch $@

$(VENV)/.benchmark-ready: $(VENV)/.ready
	@sh scripts/environment.sh $(PYTHON) $(VENV) benchmark
	@touch $@

# Apart from the other: it pins torch, which this one does not.
$(ACCELERATOR)/.ready: pyproject.toml src/napari_beerlanet/_version.py scripts/environment.sh
	@sh scripts/environment.sh $(PYTHON) $(ACCELERATOR) all,test,accelerator
	@touch $@
