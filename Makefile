# nanofleet: the commands of this repository. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
export PATH := $(BIN):$(PATH)
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg

CORPUS ?=
LAB ?= lab
ARGS ?=
# Labs of the tests carry this checkout's mark, so that two checkouts can test side by side.
export NANOFLEET_TEST_LAB ?= t$(shell printf '%s' '$(CURDIR)' | cksum | cut -c1-5)

.PHONY: help
help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: venv
venv: ## install all that a controller needs into .venv
	@scripts/bootstrap.sh venv

.PHONY: lab-tools
lab-tools:
	@scripts/bootstrap.sh lab

.PHONY: demo
demo: lab-tools venv ## two hosts on this machine, a corpus, a model training on both (CORPUS=dir, LAB=name, ARGS="--steps 300")
	@python -m fleet demo --lab $(LAB) $(if $(CORPUS),--corpus "$(CORPUS)") $(ARGS)

# Ask for a password if sudo asks for one.
ASK_BECOME = $(shell [ "$$(id -u)" = 0 ] || sudo -n true 2>/dev/null || echo -K)

.PHONY: lab-up
lab-up: lab-tools venv ## start the lab alone: two systemd hosts with sshd and ufw (LAB=name)
	@ansible-playbook lab.yml -e lab_state=up -e lab_name=$(LAB) $(ASK_BECOME)

.PHONY: lab-down
lab-down: venv ## stop the lab and take its containers, network and state away (LAB=name)
	@ansible-playbook lab.yml -e lab_state=down -e lab_name=$(LAB) $(ASK_BECOME)

.PHONY: lint
lint: venv ## ruff, mypy, yamllint, ansible-lint (production, strict)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint-python lint-ansible

.PHONY: lint-python
lint-python:
	ruff check .
	ruff format --check .
	mypy

.PHONY: lint-ansible
lint-ansible:
	yamllint --strict .
	ansible-lint --offline

# An environment of its own: it would add 27 packages to that of every developer, Sphinx among them.
ANTSIBULL := .cache/antsibull/bin/antsibull-docs
.PHONY: lint-docs
lint-docs: venv ## antsibull-docs: the documentation of modules, filters and roles, as Ansible's documentation site checks it
	@test -x $(ANTSIBULL) || { python -m venv .cache/antsibull && .cache/antsibull/bin/pip install -q antsibull-docs==2.28.0; }
	$(ANTSIBULL) lint-collection-docs --plugin-docs .

.PHONY: test-fast
test-fast: lint ## lint, and the tests that start neither containers nor Ansible nor ranks: under 3 minutes
	pytest -n 2 --dist worksteal -m "not lab and not slow and not processes"

.PHONY: test
test: lab-tools test-fast lint-docs ## and ranks that train, Molecule on Debian 12 and 13 hosts, end to end over SSH, and a soak of 4 minutes
	@scripts/bootstrap.sh browser
	pytest -n 2 --dist worksteal -m "processes and not slow"
	scripts/molecule.sh default trixie network
	pytest -m "lab and not slow"
	NANOFLEET_FAULTS_MINUTES=3 pytest -s tests/e2e/test_soak.py

.PHONY: test-full
test-full: lab-tools lint lint-docs ## everything but the planted faults (make test-faults)
	pytest -n 2 --dist worksteal -m "not lab"
	scripts/bootstrap.sh noble
	scripts/molecule.sh default trixie noble network reset nosudo three upgrade installed
	pytest -m "lab and not faults"

.PHONY: test-gpu
test-gpu: venv ## what a GPU computes, on a machine that has one, with the CUDA build of torch
	pytest -m gpu tests/trainer/test_cuda.py

.PHONY: test-faults
test-faults: lab-tools venv ## plant faults in running trainings on a lab; messages and recovery go to docs/faults.md
	NANOFLEET_FAULTS_PAGE=1 pytest -m faults

.PHONY: lock
lock: venv ## the packages of every extra and their hashes, to requirements/hashes.txt (after constraints.txt or pyproject.toml has changed)
	@python scripts/lock.py

.PHONY: bench
bench: lab-tools venv ## how fast one host and two are, on a lab of its own (ARGS="--quick", "--only exact-4096", "--list", "--record")
	@python -m benchmarks.lab $(ARGS)

.PHONY: replay
replay: venv ## plain DDP and nanofleet on the hosts of your inventory, beside an effort by hand (ARGS="--report", "--record")
	@python -m benchmarks.replay $(ARGS)

.PHONY: docs
docs: venv ## the documentation as a site, in build/site (needs no network once built)
	@python -m mkdocs --version >/dev/null 2>&1 || python -m pip install -q -c constraints.txt -e '.[docs]'
	python -m scripts.docs_reference
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

.PHONY: clean
clean: ## caches and build outputs of this checkout (not .venv, .ansible, data, .lab)
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache build dist artifacts
