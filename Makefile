# One verb each; the work is in scripts/. Pass arguments with ARGS="...", choose a Python with PYTHON=python3.12.
.PHONY: install serve test test-all check bench lock

install: ## make .venv and install Twinjet with all that its tests need
	@scripts/install

serve: ## install, pull the default model, warm up, serve on 127.0.0.1:8000
	@scripts/serve $(ARGS)

test: ## install, run all tests but the slow ones
	@scripts/test $(ARGS)

test-all: ## install, run all tests
	@scripts/test-all $(ARGS)

check: ## install, lint, format, types, layers, no machine paths
	@scripts/check

bench: ## install, run the benchmarks under benchmarks/
	@scripts/bench $(ARGS)

lock: ## resolve all dependencies anew into requirements/lock.txt
	@scripts/lock
