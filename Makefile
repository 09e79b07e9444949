# The two commands of the README: `make report` runs the main job, `make test` runs the tests. Both set up all they need.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,$(shell command -v $(name) 2>/dev/null)))
TEST_ENVIRONMENTS ?= quality,py311-all,py311-numpy
# tox looks for interpreters on PATH; pyenv keeps its own out of it.
space := $(subst ,, )
TOX = TOX_RUNNER=$$(cat .tools/runner) .tools/bin/tox
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export UV_HTTP_TIMEOUT ?= 60
export PATH := $(PATH):$(subst $(space),:,$(wildcard $(HOME)/.pyenv/versions/*/bin))

.PHONY: report test processors matrix publish survey clean

report: .venv/installed
	.venv/bin/attncheck check --backend numpy,torch,tensorflow,jax --output results/latest

test: .tools/installed
	$(TOX) run-parallel --parallel-no-spinner -e $(TEST_ENVIRONMENTS)

# The standard cases as lesser processors compute: all that this one can be, or those in ISAS.
processors: .tools/installed
	test -x .tox/py311-all/bin/attncheck || $(TOX) run -e py311-all --notest
	$(TOX) exec -e py311-all --skip-pkg-install -- python benchmarks/processors.py $(ISAS)

# Every environment of tox.ini, then one report over all of them.
matrix: .tools/installed
	$(TOX) run
	$(TOX) run -e report

# The comparison that the repository keeps; what disagrees (code 1) is published too.
publish: .venv/installed
	.venv/bin/attncheck check --backend numpy,torch,tensorflow,jax --all-cases --output results/published || test $$? -eq 1
	.venv/bin/attncheck publish results/published --published reports/published

# The table of all implementations; the lines of what is installed are written anew, the others stay.
survey: .venv/installed
	.venv/bin/attncheck check --implementation all --no-report --output results/survey || test $$? -eq 1
	.venv/bin/attncheck survey results/survey --findings examples/findings --output reports/published/survey

.venv/installed: pyproject.toml constraints.txt .tools/runner
	$(PYTHON) -m venv .venv
	if grep -q uv .tools/runner; then install='.tools/bin/uv pip install --python .venv/bin/python'; \
	else install='.venv/bin/python -m pip install --disable-pip-version-check'; fi; \
	$$install --quiet --constraint constraints.txt --editable '.[all]'
	touch $@

.tools/installed: .tools/runner constraints.txt
	.tools/bin/python -m pip install --quiet --constraint constraints.txt tox tox-uv
	touch $@

# uv sets environments up in a tenth of pip's time, but reads no configuration of pip. Where it finds another torch than
# the CPU's, which may bring gigabytes along, or nothing at all, pip goes on.
.tools/runner: constraints.txt
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	if .tools/bin/uv pip install --dry-run --python .tools/bin/python --constraint constraints.txt torch 2>&1 \
	| grep -q '+ torch==.*+cpu'; then echo uv-venv-runner; else echo virtualenv; fi > $@

clean:
	rm -rf .venv .tools .tox build dist results *.egg-info
