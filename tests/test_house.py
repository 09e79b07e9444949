"""Rules that keep the code small and readable. house.yaml lists today's exceptions; the list may only shrink.

``python tests/test_house.py`` prints the exceptions as they are now. A commit that adds one gives the reason.
``python tests/test_house.py --release`` prints the folders that have grown since the last release, and exits with 1 if
there are any. ``--record`` writes the sizes of all folders to sizes.yaml, once a release has them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck.diagnosis.readings import READING_CATALOGUE

ROOT = Path(__file__).parent.parent
ALLOWANCES = Path(__file__).with_name("house.yaml")
BUDGETS = Path(__file__).with_name("sizes.yaml")
FOLDERS = ("harness", "backends", "reports")
FEW_LINES = 120
FEW_PARAMETERS = 12
MANY_ITEMS = 200
FILES_OF_AN_OPTION, FILES_OF_AN_OPERATION = 20, 10
MANY_CROSSED = 20
FEW_STATEMENTS = 4
CLAUSES = tuple(
    f"{word} "
    for word in ["What", "Whether", "Whom", "When", "Where", "Which", "Who", "How", "If", "Say", "Let", "Those"]
)
VAGUE = {"each", "found", "own", "given"}
MOST_SMALL_FUNCTIONS = 703
"""Small functions with one caller: each hides a few lines behind a name. Many are terms of the field, so not all go."""
CATALOGUE_FILES = re.compile(
    r"harness/(diagnosis/(readings\w*|replaced_steps)|judging/empty_row_conventions|spec/options)\.py"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> dict[str, str]:
    """Return the text of each file of the product, by its path below the root."""
    files = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


@cache
def trees() -> dict[str, ast.Module]:
    return {file: ast.parse(text) for file, text in sources().items()}


def module_of(file: str) -> str:
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(("attncheck", *parts[parts[0] == "harness" :]))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of everything that a file imports from the product, for types alone left out."""
    parts = (part for part in tree.body if not isinstance(part, ast.If) or ast.unparse(part.test) != "TYPE_CHECKING")
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attncheck"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@cache
def importers() -> dict[str, set[str]]:
    """Return the files that import each file."""
    files = {module_of(file): file for file in sources()}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in trees().items():
        for module, name in imports(tree):
            imported = files.get(f"{module}.{name}", files.get(module))
            if imported and imported != file:
                found[imported].add(file)
    return found


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> list[str]:
    arguments = function.args
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def folder_sizes() -> dict[str, list[int]]:
    """Return the number of files and of lines of each folder, lines in hundreds as they round up."""
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for file, text in sources().items():
        folder = "/".join(file.split("/")[:2]) if file.count("/") > 1 else file.split("/")[0]
        files[folder] += 1
        lines[folder] += text.count("\n")
    return {folder: [files[folder], -(-lines[folder] // 100) * 100] for folder in sorted(files)}


def small_files_of_one_importer() -> list[str]:
    """Return the files of under 120 lines that one file of their own folder imports, and no other."""
    return sorted(
        file
        for file, text in sources().items()
        if text.count("\n") < FEW_LINES
        and len(importers().get(file, ())) == 1
        and {Path(importer).parent for importer in importers()[file]} == {Path(file).parent}
    )


def counts(names: Iterable[str], most: int = 0) -> dict[str, int]:
    """Return how often each name occurs, of those that occur more often than that."""
    return {name: count for name, count in sorted(Counter(names).items()) if count > most}


def class_names_of_several_files() -> list[str]:
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    return [*counts((node.name for node in nodes if isinstance(node, ast.ClassDef)), 1)]


def file_names_of_several_folders() -> list[str]:
    return [*counts((Path(file).name for file in sources() if not file.endswith("__init__.py")), 1)]


def functions_of_many_parameters() -> dict[str, int]:
    """Return the functions of more than 12 parameters outside the contract, which backends and faults repeat."""
    return {
        f"{file}: {function.name}": len(parameters(function))
        for file, tree in trees().items()
        if not file.startswith(("backends/", "harness/mutation/"))
        for function in functions(tree)
        if len(parameters(function)) > FEW_PARAMETERS
    }


def hands_on(function: Function) -> bool:
    """Report whether a function returns another's result for its own arguments, and does nothing else."""
    body = function.body[ast.get_docstring(function) is not None :]
    if len(body) != 1 or not isinstance(body[0], ast.Return) or not isinstance(body[0].value, ast.Call):
        return False
    call = body[0].value
    given = [ast.unparse(argument) for argument in call.args] + [ast.unparse(word.value) for word in call.keywords]
    named = all(word.arg == ast.unparse(word.value) for word in call.keywords)
    return bool(given) and given == parameters(function) and named and not function.decorator_list


def functions_that_hand_on() -> list[str]:
    return sorted(
        f"{file}: {function.name}"
        for file, tree in trees().items()
        if not file.startswith(("backends/", "harness/mutation/"))
        for function in tree.body
        if isinstance(function, Function) and hands_on(function)
    )


def private_names_of_other_files() -> dict[str, int]:
    """Return how many names that begin with an underscore each folder imports from which file."""
    return counts(
        f"{Path(file).parent.as_posix()}: {module}"
        for file, tree in trees().items()
        for module, name in imports(tree)
        if name.startswith("_") and not name.startswith("__")
    )


def docstrings_that_ask() -> dict[str, int]:
    """Return how many docstrings of each file begin with a clause instead of a noun or an imperative."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    return counts(
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith(CLAUSES)
    )


def vague_variables() -> dict[str, int]:
    """Return how many variables and parameters of each file have a name that fits any value."""
    return counts(
        file
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE)
        or (isinstance(node, ast.arg) and node.arg in VAGUE)
    )


def small_functions_of_one_caller() -> list[str]:
    """Return the private functions of at most 4 statements that their file uses at one place.

    Each file counts its functions separately, so that the names of other files do not change the number.
    """
    small = []
    for file, tree in trees().items():
        nodes = list(ast.walk(tree))
        uses = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
        for node in nodes:
            if isinstance(node, Function) and node.name.startswith("_") and not node.decorator_list:
                statements = len(node.body) - (ast.get_docstring(node) is not None)
                if statements <= FEW_STATEMENTS and uses[node.name] == 1:
                    small.append(f"{file}: {node.name}")
    return small


@cache
def files_that_name() -> dict[str, set[str]]:
    """Return the files that have each word as a text of its own, a parameter or a keyword, faults aside."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file, tree in trees().items():
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(name)) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                    found[name].add(file)
    return {name: {file for file in files if "/mutation/" not in file} for name, files in found.items()}


def options() -> set[str]:
    tree = trees()["harness/spec/options.py"]
    [own] = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    fields = (node.target for node in own.body if isinstance(node, ast.AnnAssign))
    return {field.id for field in fields if isinstance(field, ast.Name)}


def options_of_many_files() -> dict[str, int]:
    return counts((name for name in options() for _ in files_that_name()[name]), FILES_OF_AN_OPTION)


def operations_of_many_files() -> dict[str, int]:
    return counts((name for name in operations() for _ in files_that_name()[name]), FILES_OF_AN_OPERATION)


@cache
def operations() -> set[str]:
    """Return the names of operations whose name no option, stage or input has too."""
    tree = trees()["harness/spec/operations.py"]
    rows = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Operation")
    return {ast.literal_eval(row.args[0]) for row in rows if row.args and isinstance(row.args[0], ast.Constant)}


def branches_on_operations() -> dict[str, int]:
    """Return how often each file compares with an operation's name outside the specification, graph and backends."""
    at_home = ("backends/", "harness/spec/", "harness/attention/graph.py", "harness/mutation/")
    found: Counter[str] = Counter()
    for file, tree in trees().items():
        for node in ast.walk(tree):
            compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            compared += [node.value] if isinstance(node, ast.MatchValue) else []
            constants = [part.value for part in compared for part in ast.walk(part) if isinstance(part, ast.Constant)]
            found[file] += any(constant in operations() for constant in constants if isinstance(constant, str))
    return {file: count for file, count in sorted(found.items()) if count and not file.startswith(at_home)}


def conventions_of_other_files() -> dict[str, int]:
    """Return how many files beside the catalogue have the name of a reading as a text of its own, faults aside."""
    names = {reading.name for readings in READING_CATALOGUE.values() for reading in readings}
    files = ((name, file) for name in names for file in files_that_name().get(name, ()))
    return counts(name for name, file in files if not CATALOGUE_FILES.match(file))


RULES = {
    "small files of one importer": small_files_of_one_importer,
    "class names of several files": class_names_of_several_files,
    "file names of several folders": file_names_of_several_folders,
    "functions of many parameters": functions_of_many_parameters,
    "functions that hand on": functions_that_hand_on,
    "private names of other files": private_names_of_other_files,
    "options of many files": options_of_many_files,
    "operations of many files": operations_of_many_files,
    "branches on operations": branches_on_operations,
    "conventions of other files": conventions_of_other_files,
    "docstrings that ask": docstrings_that_ask,
    "vague variables": vague_variables,
}


@cache
def allowances() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(ALLOWANCES.read_text(encoding="utf-8"))
    return loaded


def counted(found: Sequence[str] | Mapping[str, int]) -> Mapping[str, int]:
    return found if isinstance(found, Mapping) else dict.fromkeys(found, 1)


def test_no_import_goes_in_a_circle_not_even_one_in_a_function() -> None:
    """``CycleError`` names the files."""
    TopologicalSorter(importers()).prepare()


@pytest.mark.parametrize("rule", RULES)
def test_nothing_breaks_a_rule_but_what_stood_before(rule: str) -> None:
    found, allowed = counted(RULES[rule]()), counted(allowances()[rule])
    assert {name: count for name, count in found.items() if count > allowed.get(name, 0)} == {}, rule
    # An allowance that is not needed any more goes from tests/house.yaml, so that nothing fills it again.
    assert {name: count for name, count in allowed.items() if count > found.get(name, 0)} == {}, rule


def test_few_small_functions_have_one_caller() -> None:
    assert len(small_functions_of_one_caller()) <= MOST_SMALL_FUNCTIONS


def test_the_walk_of_one_case_crosses_twenty_files_that_are_there() -> None:
    page = (ROOT / "docs/architecture/index.md").read_text(encoding="utf-8")
    crossed = set(re.findall(r"`([a-z_0-9/]+\.py)`", page.partition("## From a YAML line to a row")[2]))
    assert crossed <= sources().keys()
    assert len(crossed) <= MANY_CROSSED


def test_no_test_function_makes_two_hundred_items(request: pytest.FixtureRequest) -> None:
    items = Counter(item.nodeid.split("[")[0] for item in request.session.items)
    assert {name: count for name, count in items.items() if count >= MANY_ITEMS} == {}


def over_budget() -> dict[str, tuple[list[int], list[int]]]:
    """Return the folders with more files or lines than at the last release: the size now, and then."""
    budgets = yaml.safe_load(BUDGETS.read_text(encoding="utf-8"))
    sizes = folder_sizes()
    return {
        folder: (sizes[folder], budgets.get(folder, [0, 0]))
        for folder in sizes
        if any(now > before for now, before in zip(sizes[folder], budgets.get(folder, [0, 0]), strict=True))
    }


def main() -> int:
    """Print the exceptions as tests/house.yaml has them, or the folders that have grown; or record the sizes."""
    if "--record" in sys.argv[1:]:
        BUDGETS.write_text("".join(f"{folder}: {size}\n" for folder, size in folder_sizes().items()), encoding="utf-8")
        return 0
    if "--release" not in sys.argv[1:]:
        print(yaml.safe_dump({name: rule() for name, rule in RULES.items()}, sort_keys=False, width=200), end="")
        return 0
    grown = over_budget()
    for folder, ((files, lines), (files_before, lines_before)) in grown.items():
        print(f"{folder}: {files} files, {lines} lines; at the last release {files_before}, {lines_before}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
