.DEFAULT_GOAL := help
.PHONY: help setup demo check fmt test test-kills faults faults-short faults-peers soak package bench clean

PYTHON ?= python3
BIN    := .venv/bin

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[local,zstd,dev]'
	@touch $@

setup: .venv/ready ## Make .venv with everything the other targets need

demo: .venv/ready ## Run the main job on an embedded server, and kill a worker on the way
	$(BIN)/streamq demo

check: .venv/ready ## Format, lint, types, layers: everything but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: .venv/ready ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: .venv/ready ## Run the tests on every server found: embedded Valkey, a cluster of it, Redis
	$(BIN)/pytest -n auto

package: .venv/ready ## Build sdist and wheel, then try the wheel in an empty environment
	rm -rf build dist .venv-package
	$(BIN)/python -m build -q
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install -q --disable-pip-version-check -c constraints.txt pytest "$$(ls dist/*.whl)[local]"
	cd .venv-package && cp ../tests/test_package.py . && STREAMQ_CHECKOUT=.. bin/python -m pytest -q -c /dev/null test_package.py
	cd .venv-package && bin/streamq --version && timeout -s INT 2 bin/streamq server || true
	rm -rf .venv-package

test-kills: .venv/ready ## Kill workers for half a minute, and loader and collector 50 times, on each server
	STREAMQ_TEST_KILL_S=30 STREAMQ_TEST_KILLS=50 $(BIN)/pytest -k "TestKills or killed_at_random" -rP --timeout 600

FAULTS_N ?= 5000
faults: .venv/ready ## Every fault on every server, half an hour; writes the tables of docs/faults.md
	rm -rf build/faults && mkdir -p build/faults
	$(BIN)/python -m tests.faults run --parts $(FAULTS_N) --results build/faults/figures --keep build/faults; \
	  code=$$?; $(BIN)/python -m tests.faults report build/faults/figures docs/faults.md; exit $$code

faults-short: .venv/ready ## The faults that bite most, three minutes
	$(BIN)/python -m tests.faults short

# One each: what they need of the driver does not fit together.
.venv-peers/ready:
	for queue in rq 'celery[redis]' 'dramatiq[redis]' arq streaq; do \
	  $(PYTHON) -m venv ".venv-peers/$${queue%%[*}" && \
	  ".venv-peers/$${queue%%[*}/bin/pip" install -q --disable-pip-version-check "$$queue" || exit 1; done
	@touch $@

faults-peers: .venv/ready .venv-peers/ready ## The kill test for other queues
	$(BIN)/python -m tests.faults.peers

SOAK_S ?= 3600
soak: .venv/ready ## Let requests come and go for SOAK_S seconds (an hour): nothing may grow or remain
	$(BIN)/python -m tests.faults.soak --seconds $(SOAK_S) $(if $(filter 3600,$(SOAK_S)),--report docs/soak.md)

bench: .venv/ready ## Measure what the protocol costs, and how long one part waits
	$(BIN)/python bench/protocol.py
	$(BIN)/python bench/latency.py
	$(BIN)/python bench/priority.py

clean: ## Remove what was built; .venv stays
	rm -rf build dist *.egg-info .venv-package .pytest_cache .mypy_cache .ruff_cache .hypothesis
