# The two commands of the README: `make report` runs the main job, `make test` runs the tests. Both set up all they need.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,$(shell command -v $(name) 2>/dev/null)))
TEST_ENVIRONMENTS ?= lint,type,docs,py311-all,py311-numpy
# tox looks for interpreters on PATH; pyenv keeps its own out of it.
space := $(subst ,, )
export PATH := $(PATH):$(subst $(space),:,$(wildcard $(HOME)/.pyenv/versions/*/bin))

.PHONY: report test matrix publish survey clean

report: .venv/installed
	.venv/bin/attncheck check --backend numpy,torch,tensorflow,jax --output results/latest

test: .tools/installed
	.tools/bin/tox run -e $(TEST_ENVIRONMENTS)

# Every environment of tox.ini, then one report over all of them.
matrix: .tools/installed
	.tools/bin/tox run
	.tools/bin/tox run -e report

# The comparison that the repository keeps; what disagrees (code 1) is published too.
publish: .venv/installed
	.venv/bin/attncheck check --backend numpy,torch,tensorflow,jax --all-cases --output results/published || test $$? -eq 1
	.venv/bin/attncheck publish results/published --published reports/published

# The table of all implementations; the lines of what is installed are written anew, the others stay.
survey: .venv/installed
	.venv/bin/attncheck check --implementation all --no-report --output results/survey || test $$? -eq 1
	.venv/bin/attncheck survey results/survey --findings docs/findings.md --output reports/published/survey

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
	touch $@

.tools/installed: constraints.txt
	$(PYTHON) -m venv .tools
	.tools/bin/python -m pip install --quiet --constraint constraints.txt tox
	touch $@

clean:
	rm -rf .venv .tools .tox build dist results *.egg-info
