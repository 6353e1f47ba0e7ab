# Needs Python 3.11, gcc and make. Everything else goes into .venv; nothing outside this folder is touched.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
RUN := .venv/bin/python
TEXT ?= Good morning! 5 + 7 = 12.

# Packages are installed without bytecode; kept from writing it, every start would compile vLLM and torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-dev demo test check format bench soak clean
.NOTPARALLEL:

setup:  ## the CPU runtime
	@$(PYTHON) tools/setup_venv.py

setup-dev:  ## and the tools of tests and checks
	@$(PYTHON) tools/setup_venv.py --dev

demo: setup  ## say a sentence with the packaged voice
	@$(RUN) -m stagevox.cli.main say "$(TEXT)"

test: check  ## all that a change must pass
	$(RUN) -m pytest

check: setup-dev  ## lint, format and types, without tests
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: setup-dev  ## mend what check would complain of, as far as a tool can
	$(RUN) tools/requirements_table.py
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup  ## measure
	$(RUN) -m stagevox.bench.step
	$(RUN) -m stagevox.bench.say

soak: setup-dev  ## the long runs: 2,000 requests drawn from the server's description, 1,000 spoken ones, 200 aborts
	STAGEVOX_FUZZ_EXAMPLES=2000 $(RUN) -m pytest -q tests/unit/server/test_fuzz.py
	$(RUN) tools/soak.py

clean:  ## all that make made
	rm -rf .venv .venv.lock build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
