PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test quick check bench compat docs docs-serve

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,theory,bench,test]'
	touch $@

demo: setup
	$(BIN)/thinwire demo --out out/demo

# The tests that make networks mostly wait, the others mostly compute: side by side they take half of the time. The others
# end sooner, and take some of the networks' after that.
LAB := "lab and not huge"
BESIDE := $(addprefix tests/test_,ddp.py fsdp.py tied.py optim.py precompile.py faults.py train_rows.py)
test: setup
	@mkdir -p out; \
	( $(BIN)/python -m pytest -p no:cacheprovider -m "not lab and not huge"; computing=$$?; \
	  $(BIN)/python -m pytest -p no:cacheprovider -m $(LAB) $(BESIDE); exit $$((computing + $$?)) \
	) > out/test-beside.log 2>&1 & beside=$$!; trap "pkill -P $$beside; kill $$beside" INT TERM; \
	$(BIN)/python -m pytest -m $(LAB) $(addprefix --ignore=,$(BESIDE)); networks=$$?; \
	wait $$beside; others=$$?; cat out/test-beside.log; \
	exit $$((networks + others))

# For whoever develops: what is known within minutes and without a network. It leaves out the tests that make networks
# (lab) or take 3 seconds and more (slow), and whole files of: Triton's interpreter, theory runs, models and trainings,
# examples and compiling. Hypothesis tries 10 inputs per test instead of 60. `make test` is everything.
LONG := $(addprefix tests/test_,kernels_gpu.py kernels_gpu_select.py precompile_gpu.py convex.py train_models.py \
	train_lora.py train_split.py train_plain.py train_encoders.py train_command.py pipeline_example.py \
	examples_ddp.py precompile.py)
quick: setup
	HYPOTHESIS_PROFILE=quick $(BIN)/python -m pytest -m "not lab and not huge and not slow" $(addprefix --ignore=,$(LONG))

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/check_readme.py

# The fast tests on the oldest, the pinned and the newest torch, each in its own environment under .compat/, and a table.
# The environments are made once, some 6 GB each with torch's CUDA builds; delete .compat/ to have them made anew.
# PYTHON=python3.13 takes another interpreter (docs/versions.md).
compat:
	$(PYTHON) tests/compat.py

# The documentation site, into out/site. Its small environment (200 MB, 20 s, once) is its own: pages and docstrings are
# read, nothing is imported, so torch is not needed. --strict: a warning, such as a dead link, fails.
DOCS := .docs-env
DOCS_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(PYTHON) -c '$(DOCS_NEEDS)' > $(DOCS)/needs.txt
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -r $(DOCS)/needs.txt
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

bench: setup
	$(BIN)/thinwire bench codecs --json out/bench/codecs.json
	$(BIN)/thinwire bench link --json out/bench/link.json
