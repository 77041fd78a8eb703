PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,test,bench]'
	touch $@

demo: setup
	$(BIN)/thinwire demo --out out/demo

# The tests that make networks mostly wait, the others mostly compute: side by side they take two thirds of the time.
test: setup
	@mkdir -p out; \
	$(BIN)/python -m pytest -p no:cacheprovider -m "not lab and not huge" > out/test-computing.log 2>&1 & other=$$!; trap "kill $$other" INT TERM; \
	$(BIN)/python -m pytest -m "lab and not huge"; networks=$$?; \
	wait $$other; computing=$$?; cat out/test-computing.log; \
	exit $$((networks + computing))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/check_readme.py

bench: setup
	$(BIN)/thinwire bench codecs --json out/bench/codecs.json
	$(BIN)/thinwire bench link --json out/bench/link.json
