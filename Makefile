# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
ARGS   ?=
SEEDS  ?= 0:3000
PROOFS ?= 0:1000
JOBS   ?= 2
# Bytecode is kept, whatever the shell says (empty means so): hundreds of processes are started, each of which would compile
# the package again, and pytest would rewrite 8,000 assertions again in each process of each run.
export PYTHONDONTWRITEBYTECODE :=
# Most tests wait more than they work: two processes take half of the time. A file stays in one, for what it starts is
# shared, and so do all tests of Ray, which have one cluster (tests/conftest.py).
SPREAD ?= -n $(JOBS) --dist loadgroup

.PHONY: help demo test test-long lint format simulate simulate-sharded scale mutants mutants-quick fuzz bench
.PHONY: chaos chaos-smoke durability proofs soak soak-smoke test-shards test-ray test-router test-vllm test-vllm-smoke test-wheel clean

help: ## Show the targets.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed ## Watch the whole loop learn on this machine (ARGS="--seed 1").
	$(BIN)/rollout-svc demo $(ARGS)

test: $(VENV)/.installed ## Run the tests (ARGS="-k pause"; SPREAD= for one process).
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-long: $(VENV)/.installed ## Run those that wait for real processes again and again (about two minutes).
	$(BIN)/python -m pytest $(SPREAD) tests/long $(ARGS)

lint: $(VENV)/.installed ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simulate: $(VENV)/.installed ## Tell histories of the service in virtual time (SEEDS=123:124, JOBS=1, ARGS="--adversarial").
	$(BIN)/python -m tests.simulation $(SEEDS) --jobs $(JOBS) $(ARGS)

simulate-sharded: $(VENV)/.installed ## The same of a coordinator over several services (SEEDS=0:500, JOBS=1, ARGS="--tell").
	$(BIN)/python -m tests.simulation.sharded $(SEEDS) --jobs $(JOBS) $(ARGS)

scale: $(VENV)/.installed ## Measure what engines and requests in flight cost, up to 1,000 and 100,000 (ARGS="--cases 100x10000"; 3 minutes).
	$(BIN)/python -m tests.simulation.scale $(ARGS)

mutants: $(VENV)/.installed ## Put each of the known bugs into the service and have the simulator find it (ARGS="NAME --record").
	$(BIN)/python -m tests.simulation.mutants --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

mutants-quick: $(VENV)/.installed ## The same with each mutant's recorded seed and 100 more (about 3 minutes on 2 cores).
	$(BIN)/python -m tests.simulation.mutants --quick --jobs $(JOBS) $(ARGS)

fuzz: $(VENV)/.installed ## Send the control API whatever its own description allows, forbids or forgets (ARGS="--seed 7").
	$(BIN)/python -m tests.rpc.fuzz --examples 300 $(ARGS)

bench: $(VENV)/.installed ## Run every bench (about 62 minutes on 2 cores).
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.dispatch
	$(BIN)/python -m bench.stall
	$(BIN)/python -m bench.pause
	$(BIN)/python -m bench.refill
	$(BIN)/python -m bench.recovery
	$(BIN)/python -m bench.journal
	$(BIN)/python -m bench.longtail
	$(BIN)/python -m bench.sessions
	$(BIN)/python -m bench.rtensor
	$(BIN)/python -m bench.weights
	$(BIN)/python -m bench.judges
	$(BIN)/python -m bench.cluster

# Real sockets, real processes, real time: what no test of the default suite may need. The flaps have a process of their
# own: in one that held 4,096 calls before, memory that grows would not show.
chaos: $(VENV)/.installed ## Pause under every fault over real sockets; rewrites the table in docs/stopping.md (about 10 minutes).
	$(BIN)/python -m pytest -s tests/chaos/test_flaps.py
	CHAOS_TABLE=docs/stopping.md $(BIN)/python -m pytest -s tests/chaos --ignore=tests/chaos/test_flaps.py $(ARGS)

chaos-smoke: $(VENV)/.installed ## The same, small: 256 in flight, 100 flaps (under 2 minutes).
	CHAOS_SMOKE=1 $(BIN)/python -m pytest -s tests/chaos/test_flaps.py
	CHAOS_SMOKE=1 $(BIN)/python -m pytest -s tests/chaos --ignore=tests/chaos/test_flaps.py $(ARGS)

# A real process that is killed: each round takes about a second.
durability: $(VENV)/.installed ## Kill a loaded service 200 times and account for every prompt (ARGS="--rounds 20").
	$(BIN)/python -m tests.durability $(ARGS)

# Real sockets and a real engine: each seed takes a third of a second.
proofs: $(VENV)/.installed ## Update weights at any moment of 1,000 schedules and check every logprob (PROOFS=7:8; 6 minutes).
	PROOF_SEEDS=$(PROOFS) $(BIN)/python -m pytest tests/weights/proofs/test_schedules.py $(ARGS)

# A controller, 2 owners, 12 consumers: too many processes for the default suite, which has a smaller house.
test-shards: $(VENV)/.installed ## End 300 steps in 15 processes with nothing left in any (under a minute).
	$(BIN)/python -m pytest -s tests/steps $(ARGS)

soak: $(VENV)/.installed ## Run 1,000 steps with experts, then 1,000 pauses: nothing grows (ARGS="--out DIR"; about 8 minutes).
	$(BIN)/python -m tests.soak --steps 1000 --pauses 1000 $(ARGS)

soak-smoke: $(VENV)/.installed ## The same, 100 of each (half a minute).
	$(BIN)/python -m tests.soak --steps 100 --pauses 100 $(ARGS)

# A real vLLM on a CPU, in an environment of its own: its torch and its transformers are not ours. pip has to find the CPU
# build of torch; torchvision and the others come as CUDA builds, which break transformers beside it.
$(VLLM)/.installed: tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -r tests/vllm/requirements.txt
	$(VLLM)/bin/pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch $@

# All of it, green, is written down: `.ci/run` does not repeat it on the same files.
test-vllm: $(VENV)/.installed $(VLLM)/.installed ## Run the tests against a real vLLM (about 5 minutes; ARGS="-k burst").
	$(BIN)/python -m pytest tests/vllm $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.vllm.choose --record)

test-vllm-smoke: $(VENV)/.installed $(VLLM)/.installed ## The few of them that show most (about 2 minutes).
	$(BIN)/python -m pytest tests/vllm -m smoke $(ARGS)

# The tests once more, against what users install: in a folder without the sources, in an environment of its own.
test-wheel: $(VENV)/.installed ## Run the tests against the built wheel.
	rm -rf dist .venv-wheel .wheel-tests
	$(BIN)/python -m build --wheel --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[dev]"
	mkdir .wheel-tests
	cp -r tests bench configs pyproject.toml .wheel-tests/
	cd .wheel-tests && ../.venv-wheel/bin/python -m pytest $(SPREAD) $(ARGS)

# The router users run, in an environment of its own: it brings a web framework of its own, and no torch.
.venv-router/.installed: Makefile
	$(PYTHON) -m venv .venv-router
	.venv-router/bin/pip install --quiet --disable-pip-version-check sglang-router==0.3.2
	@touch $@

# Two processes, for each has a cluster, and a process is connected to one.
test-ray: $(VENV)/.installed ## Test on a Ray cluster of four nodes on this machine (ARGS="-m short": a part of it).
	$(BIN)/python -m pytest tests/ray $(ARGS)
	$(BIN)/python -m pytest tests/cluster $(ARGS)

test-router: $(VENV)/.installed .venv-router/.installed ## Test behind a real sglang-router, with real engines (about 2 minutes).
	$(BIN)/python -m pytest -s tests/router $(ARGS)

clean: ## Remove everything that was made.
	rm -rf $(VENV) $(VLLM) .venv-wheel .venv-router .wheel-tests dist demo-out
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
