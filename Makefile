# One line per command. `make run` and `make test` set up what they need in .venv on first use.
PYTHON ?= python3
VENV ?= .venv
MODEL ?= demo/target
# The demo brings its own draft model; the hybrid one drafts with its own prediction layer.
DEMO := $(filter demo/target demo/hybrid,$(MODEL))
DRAFT ?= $(if $(filter demo/target,$(MODEL)),demo/draft)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNNABLE := $(VENV)/.runnable
# A test process uses one thread, so that two of them share two cores.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
# What Python compiles is kept, whatever the environment says: every test process and every server it starts loads it anew.
unexport PYTHONDONTWRITEBYTECODE
FUZZ_S ?= 600
SOAK_S ?= 3600

.PHONY: setup run page check fix test check-all test-browser test-gpu gpu lossless kernels bench bench-http fuzz attack soak mutants clients ray wheel docker-check docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(RUNNABLE)

# What running needs, without the development tools. Python compiles what the server imports at its first start: pip
# would compile all that lies in torch, for half of the time that it takes.
$(RUNNABLE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what the server needs into $(VENV): torch above all, 0.2 GB for CPUs and 3 GB where it brings CUDA"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e .
	touch $@

run: $(RUNNABLE)
	$(BIN)/slipstream -m $(MODEL) $(if $(DRAFT),-md $(DRAFT)) $(if $(DEMO),--alias demo) $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile
	webui/check.sh

# Builds what the server serves from webui/src; wants Node.js. The result is committed, so that nobody else needs that.
page:
	cd webui && npm ci --no-audit --no-fund && npx --no-install tsc --noEmit && node build.mjs

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup
	$(ONE_THREAD) $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder -m 'not gpu and not browser and not slow' $(ARGS)

# Every case, also of those tests of which `make test` runs a sample; renews tests/full_record.txt.
check-all: check
	$(ONE_THREAD) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not gpu and not browser and not slow' --whole --record $(ARGS)

# Wants Chromium from the system's packages, and installs it where it may. Accessibility is checked where npm is at hand.
test-browser: setup
	test -x /usr/bin/chromium || test "$$(id -u)" != 0 || { apt-get update && apt-get install -y --no-install-recommends chromium; } || echo "no Chromium: the page's tests are skipped"
	test -d webui/node_modules/axe-core || ! command -v npm >/dev/null || (cd webui && npm ci --no-audit --no-fund) || echo "no axe-core: accessibility is not checked"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[browser]'
	$(ONE_THREAD) $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m browser tests/browser $(ARGS)

test-gpu: setup
	TRITON_INTERPRET=0 $(BIN)/pytest -m gpu tests/gpu $(ARGS)

# Proves and measures the kernels on an NVIDIA GPU, in nine minutes and without setting anything up: $(PYTHON) has to
# have torch, triton, numpy, safetensors, tokenizers and cuda.core. Renews two files in OUT as results come.
gpu: export OUT := $(or $(OUT),tests/bench/results)
gpu:
	$(PYTHON) -m tests.gpu.run $(ARGS)

lossless: setup
	$(ONE_THREAD) $(BIN)/python -m tests.oracle.lossless $(ARGS)

# Speed against the device's ceilings, plain decoding, transformers and other servers (docs/performance.md).
bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m tests.bench $(ARGS)

kernels: setup
	$(BIN)/python -m tests.bench.kernels $(ARGS)

# Server time and tokens/s through HTTP, against the bare engine. Wants a quiet machine.
bench-http: setup
	$(BIN)/python -m tests.bench.http $(ARGS)

# Schemathesis over the OpenAPI document, then FUZZ_S seconds of mutated requests.
fuzz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	$(ONE_THREAD) $(BIN)/python -m tests.fuzz --seconds $(FUZZ_S) $(ARGS)

# Every way found so far in which one caller cost others time or memory, beside a stream of another key.
attack: setup
	$(ONE_THREAD) $(BIN)/python -m tests.attack $(ARGS)

# SOAK_S seconds of everything at once: nothing is lost, no text differs, nothing leaks.
soak: setup
	$(ONE_THREAD) $(BIN)/python -m tests.soak --seconds $(SOAK_S) $(ARGS)

# Plants each fault of tests/mutants/faults in a copy of the tree: do the tests turn red? ARGS="NAME …" for some of them.
mutants: setup
	$(ONE_THREAD) $(BIN)/python -m tests.mutants $(ARGS)

# Unmodified clients, each in an environment of its own below .venv-clients.
clients: setup
	$(ONE_THREAD) $(BIN)/python -m tests.clients $(ARGS)

# The cluster on Ray, in an environment of its own: clients, replicas that are killed and applications that change under
# a storm, and what it costs.
ray: setup
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	for part in clients storm changes chats overhead router_cost; do .venv-ray/bin/python -m tests.ray.$$part || exit 1; done

# Installs the wheel beside Hugging Face's `kernels` in a fresh environment and asks the server there.
wheel: setup
	$(ONE_THREAD) $(BIN)/python -m tests.wheel $(ARGS)

# Follows the Dockerfile's steps without docker, and runs what comes out.
docker-check: setup
	$(BIN)/python -m tests.docker.replay $(ARGS)

docs: setup
	$(BIN)/python -m slipstream.server.describe.flags_table docs/settings.md
	$(BIN)/python -m tests.bench.drafter_column README.md
	$(BIN)/python -m tests.bench.model_table docs/models.md
	$(BIN)/python -m slipstream.server.describe.api_page docs/api.md
	$(BIN)/python -m tests.emulator.sources kernels/cuda/registers.md

clean:
	rm -rf $(VENV) .venv-clients .venv-ray
