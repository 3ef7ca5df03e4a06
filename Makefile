.DEFAULT_GOAL := help
.PHONY: proto help setup demo check fmt test test-long model test-unit coverage test-secure test-kills test-docker test-upgrade faults faults-short faults-gateway faults-peers
.PHONY: test-ui screenshots bench-dashboard fuzz mutants soak package docs peers bench bench-quick bench-protocol bench-files clean

PYTHON ?= python3
BIN    := .venv/bin

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "%-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.venv/works: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e '.[local,zstd]'
	@touch $@

.venv/ready: .venv/works
	$(PIP) -e '.[local,remote,zstd,dev]'
	@touch $@

setup: .venv/ready ## Make .venv with everything the other targets need

demo: .venv/works ## Run the main job on an embedded server, and kill a worker on the way
	$(BIN)/streamq demo

check: .venv/ready ## Format, lint, types, layers: everything but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: .venv/ready ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Tests wait more than they work. They start thousands of processes, which need not compile each module anew.
TEST_JOBS ?= $(shell echo $$((3 * $$(getconf _NPROCESSORS_ONLN))))
test: .venv/ready ## Run the tests on every server found: embedded Valkey, a cluster of it, Redis
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(TEST_JOBS) --dist worksteal -m "not model and not long"

test-long: .venv/ready ## Run the tests that make test leaves out: kills on the other servers, a whole job on a secure cluster
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(TEST_JOBS) --dist worksteal -m long

model: .venv/ready ## Explore the whole model of the protocol, also its large configurations (a minute)
	$(BIN)/pytest -n $(TEST_JOBS) --dist worksteal tests/protocol/model

# Files in which most tests need no server: values, records, the runner, the slot table, headers of the scripts.
UNIT := $(wildcard $(addprefix tests/test_,app.py cpus.py settings.py units.py) tests/records tests/protocol/test_snapshot.py \
  tests/scripts/test_headers.py tests/telemetry/test_logs.py $(addprefix tests/worker/test_,counters.py runner.py slot_table.py turns.py))
test-unit: .venv/ready ## Run the tests that need no server: the quick loop, under 15 seconds
	$(BIN)/pytest -n 2 -m "not server and not commands and not slow" $(UNIT)

COVERAGE_SERVERS ?= valkey
coverage: export PYTHONPATH := $(CURDIR)
coverage: .venv/ready ## Run the tests on Valkey and print how much of each folder they cover, child processes too
	rm -rf build/coverage && mkdir -p build/coverage
	STREAMQ_TEST_SERVERS=$(COVERAGE_SERVERS) $(BIN)/coverage run -m pytest -o timeout=600 -n $(TEST_JOBS) --dist worksteal $(COVERAGE_OF); \
	  code=$$?; $(BIN)/coverage combine -q && $(BIN)/coverage json -q -o build/coverage/report.json && \
	  $(BIN)/python -m tests.coverage_by_folder build/coverage/report.json; exit $$code

build/ui/node_modules:
	mkdir -p build/ui && cd build/ui && npm install --silent --no-package-lock --no-audit --no-fund axe-core@4 || echo "without npm axe-core is left out"

test-ui: .venv/ready build/ui/node_modules ## Run the tests of the pages in a real browser (Debian's chromium), with axe-core
	STREAMQ_TEST_BROWSER=needed STREAMQ_TEST_SERVERS=$(COVERAGE_SERVERS) env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -rs tests/ui

screenshots: .venv/ready ## Take the pictures of the dashboard in docs/images, of a real run (needs chromium and playwright; 3 minutes)
	$(BIN)/python -m tests.ui.screenshots

bench-dashboard: .venv/ready ## Measure what the dashboard costs: pages, topics, readers (needs chromium and playwright; 5 minutes)
	$(BIN)/python bench/dashboard.py

test-secure: .venv/ready ## Run the tests of the commands over TLS, each command as the user of its role
	STREAMQ_TEST_SERVERS=secure $(BIN)/pytest -n auto -m commands

package: .venv/ready ## Build sdist and wheel, then try the wheel in an empty environment
	rm -rf build dist .venv-package
	$(BIN)/python -m build -q
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install -q --disable-pip-version-check -c constraints.txt pytest "$$(ls dist/*.whl)[local]"
	cd .venv-package && cp ../tests/repository/test_package.py . && STREAMQ_CHECKOUT=.. bin/python -m pytest -q -c /dev/null test_package.py
	cd .venv-package && bin/streamq --version && timeout -s INT 2 bin/streamq server || true
	rm -rf .venv-package

test-kills: .venv/ready ## Kill workers for half a minute, and loader and collector 50 times, on each server
	STREAMQ_TEST_KILL_S=30 STREAMQ_TEST_KILLS=50 $(BIN)/pytest -k "TestKills or killed_at_random" -rP --timeout 600

docs: .venv/ready ## Write docs/reference.md, docs/python.md, the man pages and cli/words.json from the code
	$(BIN)/python -m docs.generate

proto: .venv/ready ## Write streamq/gateway/streamq_pb2.py from proto/streamq.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=streamq/gateway proto/streamq.proto

FAULTS_N ?= 5000
faults: .venv/ready ## Every fault on every server, an hour; writes the tables of docs/faults.md
	rm -rf build/faults && mkdir -p build/faults
	$(BIN)/python -m tests.faults run --parts $(FAULTS_N) --results build/faults/figures --keep build/faults; \
	  code=$$?; $(BIN)/python -m tests.faults report build/faults/figures docs/faults.md; exit $$code

faults-short: .venv/ready ## The faults that bite most, four minutes
	$(BIN)/python -m tests.faults.soak --seconds 60 & soak=$$!; \
	$(BIN)/python -m tests.faults short; short=$$?; wait $$soak && exit $$short

faults-gateway: .venv/ready ## Workers in Node, Go and bash at gateways that are killed, eight minutes; writes its table of docs/faults.md
	$(BIN)/python -m tests.faults.gateways --keep build/faults-gateway --page docs/faults.md

# One each: what they need of the driver does not fit together.
.venv-peers/ready:
	for queue in rq 'celery[redis]' 'dramatiq[redis]' arq streaq; do \
	  $(PYTHON) -m venv ".venv-peers/$${queue%%[*}" && \
	  ".venv-peers/$${queue%%[*}/bin/pip" install -q --disable-pip-version-check "$$queue" || exit 1; done
	@touch $@

faults-peers: .venv/ready .venv-peers/ready ## The kill test for other queues
	$(BIN)/python -m tests.faults.peers

FUZZ_EXAMPLES ?= 30
fuzz: .venv/ready ## FUZZ_EXAMPLES pieces of garbage for everything that is read, and interleavings, others each time
	STREAMQ_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) STREAMQ_TEST_EXAMPLES=4 $(BIN)/pytest -n auto --timeout 3600 tests/fuzz tests/protocol/interleavings

MUTANTS ?= 30
mutants: .venv/ready ## Change the code a little, MUTANTS times for each module: tests must notice (an hour)
	$(BIN)/python -m tests.mutants --mutants $(MUTANTS)

SOAK_S ?= 3600
soak: .venv/ready ## Let requests come and go for SOAK_S seconds (an hour): nothing may grow or remain
	$(BIN)/python -m tests.faults.soak --seconds $(SOAK_S) $(if $(filter 3600,$(SOAK_S)),--report docs/soak.md --summary docs/faults.md)

test-upgrade: .venv/ready ## Run workers of the commit before and of this one on the same requests
	$(BIN)/pytest -rsP tests/upgrade

test-docker: .venv/ready ## Run both compositions on a container engine, and kill containers on the way
	tests/docker/engine.sh $(BIN)/pytest -rsP --timeout 900 tests/docker

.venv-bench/ready: $(wildcard bench/peers/*.txt) bench/peers/package.json
	$(PYTHON) -m venv .venv-bench/new
	$(PYTHON) -m venv .venv-bench/old
	.venv-bench/new/bin/pip install -q --disable-pip-version-check -r bench/peers/requirements.txt -c bench/peers/constraints.txt
	.venv-bench/old/bin/pip install -q --disable-pip-version-check -r bench/peers/requirements-old-driver.txt -c bench/peers/constraints-old-driver.txt
	cd bench/peers && npm install --silent --no-package-lock --no-audit --no-fund || echo "without npm there is no BullMQ on node"
	@touch $@

peers: .venv-bench/ready ## Install the peers that bench compares with, beside everything else

bench: .venv/ready .venv-bench/ready ## Measure streamq, its peers and the bare loop, and write docs/performance.md (20 minutes)
	$(BIN)/python bench/run.py

bench-quick: .venv/ready .venv-bench/ready ## One short round of the same, printed (3 minutes)
	$(BIN)/python bench/run.py --quick

bench-protocol: .venv/ready ## Measure what the scripts alone cost, and how long one part waits
	$(BIN)/python bench/protocol.py
	$(BIN)/python bench/latency.py
	$(BIN)/python bench/priority.py
	$(BIN)/python bench/load.py

bench-files: .venv/ready ## Measure files in, files out beside Pool.imap and others, the memory it takes, and Parquet
	$(BIN)/python bench/files.py
	$(BIN)/python bench/files.py --memory
	$(BIN)/python bench/tables.py
	$(BIN)/python bench/start.py

clean: ## Remove what was built; .venv stays
	rm -rf build dist *.egg-info .venv-package .pytest_cache .mypy_cache .ruff_cache .hypothesis
