# The two commands of the README: `make report` runs the main job, `make test` runs the tests. Both set up all they need.
PYTHON ?= $(firstword $(foreach name,python3.11 python3 python,$(shell command -v $(name) 2>/dev/null)))
# uv installs in a tenth of pip's time. `make report INSTALLER=pip` does without uv.
INSTALLER ?= uv
python_tag = $(shell $(PYTHON) -c 'import sys; print("py%d%d" % sys.version_info[:2])')
TEST_ENVIRONMENTS ?= quality,$(python_tag)-all,$(python_tag)-numpy
# tox looks for interpreters on PATH; pyenv keeps its own out of it.
space := $(subst ,, )
TOX = . .tools/environment && .tools/bin/tox
export UV_HTTP_TIMEOUT ?= 60
export PATH := $(PATH):$(subst $(space),:,$(wildcard $(HOME)/.pyenv/versions/*/bin))

.PHONY: report test resolve processors matrix publish survey clean

report: .venv/installed
	.venv/bin/attncheck check --backend numpy,torch,tensorflow,jax --output results/latest

test: .tools/installed
	$(TOX) run-parallel --parallel-no-spinner -e $(TEST_ENVIRONMENTS)

# The standard cases as lesser processors compute: all that this one can be, or those in ISAS.
processors: .tools/installed
	test -x .tox/$(python_tag)-all/bin/attncheck || { $(TOX) run -e $(python_tag)-all --notest; }
	$(TOX) exec -e $(python_tag)-all --skip-pkg-install -- python benchmarks/processors.py $(ISAS)

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

# Whether all pins and lower bounds can be installed together from the public index; nothing is downloaded.
resolve: .tools/installed
	.tools/bin/python .ci/resolve.py

# uv writes no bytecode unless it is told to, and every command would take half as long again without.
.venv/installed: pyproject.toml constraints.txt .tools/environment
	$(PYTHON) -m venv .venv
	. .tools/environment; \
	if test $$INSTALLER = uv; then install='.tools/bin/uv pip install --compile-bytecode --python .venv/bin/python'; \
	else install='.venv/bin/python -m pip install --disable-pip-version-check'; fi; \
	$$install --quiet --constraint constraints.txt --editable '.[all]'
	.venv/bin/python -m compileall -q backends cases harness reports
	.venv/bin/attncheck schema > cases/schema.json # for editors: the case files name it in their first line
	touch $@

.tools/installed: .tools/environment constraints.txt
	. .tools/environment; .tools/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	tox $$(test $$INSTALLER = pip || echo tox-uv)
	touch $@

# How packages are installed: by uv where pip can install uv, and with the CPU build of torch where there is one.
.tools/environment: constraints.txt .ci/choose_installer.py
	$(PYTHON) -m venv .tools
	installer=$(INSTALLER); \
	test $$installer = pip || .tools/bin/python -m pip install --quiet --disable-pip-version-check \
	--constraint constraints.txt uv || installer=pip; \
	.tools/bin/python .ci/choose_installer.py $$installer --python .tools/bin/python --output $@

clean:
	rm -rf .venv .tools .tox build dist results *.egg-info
