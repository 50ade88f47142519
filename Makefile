.PHONY: help setup demo test test-agents test-e2b lint bench soak mutants clean
PY := .venv/bin/python

help:
	@echo "make demo   set up, then show a sandbox run, snapshot, rewind, fork, checkpoint and restore"
	@echo "make test   set up, then lint and every test"
	@echo "make test-agents  the six coding agents' own programs, offline"
	@echo "make test-e2b  E2B's SDKs, all of the surface"
	@echo "make lint   ruff, mypy --strict, import-linter, generated files"
	@echo "make soak   MINUTES=10: histories and kills against the model, several at once; failures become programs in .build/soak"
	@echo "make mutants  N=200 SEED=… or SINCE=ref: small faults planted one at a time; which of them the tests notice"
	@echo "make bench  the figures, each as a ratio to a peer in the same run"

setup:
	@tools/setup.sh

demo: setup
	@$(PY) -m sandkeep demo

lint: setup
	@tools/setup.sh --tests
	@$(PY) tools/unasync.py --check
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy
	@.venv/bin/lint-imports --no-cache

test: lint
	@tools/test.sh

test-agents: lint
	@tools/agents.sh all
	@SANDKEEP_TEST_AGENTS=all $(PY) -m pytest tests/test_agents_real.py -n 2

test-e2b: lint
	@$(PY) -m pytest tests/e2b_all.py -n 2

bench: setup
	@tools/setup.sh --bench
	@$(PY) -m bench

soak: setup
	@tools/setup.sh --tests
	@$(PY) tests/model_soak.py --minutes $(or $(MINUTES),10) $(SOAK)

mutants: setup
	@tools/setup.sh --tests
	@$(PY) tools/mutants.py $(if $(N),--number $(N)) $(if $(SEED),--seed $(SEED)) $(if $(SINCE),--since $(SINCE)) $(MUTANTS)

clean:
	rm -rf .venv .build .mypy_cache .ruff_cache .hypothesis
