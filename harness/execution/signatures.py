"""The fit of a user's function to the contract's signatures, and an adapter where it does not fit.

Its query, key and value come by position, so their names do not matter unless they say another order. Every keyword is
optional: what is not there is unsupported. What it requires beyond the contract nobody can give, and it is refused.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attncheck.backends.contract import Backend, inputs_of
from attncheck.common.wording import listed
from attncheck.execution.environment import imports_of
from attncheck.execution.user_code import Target, UnfitError, innermost
from attncheck.execution.worker import clean
from attncheck.spec import OPERATIONS, OPTIONS, SCORE_SPECS, InputSpec, Operation, OptionSpec, ScoreSpec


def unfit_text(error: UnfitError, target: Target, loaded: Any) -> str:
    """Return in several lines why a target is refused, and what to do; of functions beside attention, only why."""
    lines = [clean(str(error)), f"What does not fit: {clean('; '.join(error.misfits))}."]
    called = target.attribute or error.name
    if error.name != "attention":
        return "\n".join(lines) + " Name the function that is meant: file.py:function." * inspect.ismodule(loaded)
    if not is_plain(called):
        return "\n".join(lines)
    function_name = _function_name(target, error, called)
    framework = getattr(loaded, "framework", None) or imports_of(error.function).framework
    code = adapter(error.function, function_name, framework if isinstance(framework, str) else None)
    return "\n".join([*lines, _what_to_do(target, function_name.adapter), "", *code])


def _function_name(target: Target, error: UnfitError, called: str) -> FunctionName:
    written = getattr(innermost(error.function), "__globals__", {})
    if target.pickled or target.module.endswith(".py"):
        return FunctionName(called, is_taken="attention" in written)
    root = called.partition(".")[0]
    own = f"own_{root}" if root == "attention" else root
    imported = f"from {target.module} import {root}" + (f" as {own}" if own != root else "")
    return FunctionName(own + called[len(root) :], imported)


def _what_to_do(target: Target, name: str) -> str:
    if target.pickled:
        return f"Hand over an adapter instead, {name}:"
    if not target.module.endswith(".py"):
        return f"Put this adapter into a file, adapter.py say, and name adapter.py:{name} instead:"
    path, here = Path(target.module), Path.cwd().resolve()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"Paste this adapter at the end of the file, and name {shown}:{name} instead:"


_SPECS: tuple[ScoreSpec | Operation, ...] = (*SCORE_SPECS.values(), *OPERATIONS.values())
FUNCTIONS = tuple(dict.fromkeys(spec.function for spec in _SPECS))
"""Every function of the contract that computes something."""
_CONTRACT: Mapping[str, inspect.Signature] = {name: inspect.signature(getattr(Backend, name)) for name in FUNCTIONS}
INPUTS: Mapping[str, tuple[str, ...]] = {name: inputs_of(name) for name in FUNCTIONS}
"""Every function of the contract, and what it is given by position: its own names for these do not matter."""

_SPEAKING: Mapping[str, InputSpec | OptionSpec] = {**OPERATIONS["attention"].inputs, **OPTIONS}
_MEANS: Mapping[str, str] = {
    synonym: name for name, spec in _SPEAKING.items() if spec.synonyms for synonym in (name, *spec.synonyms)
}
"""What public kernels call what the contract has, and what that is there."""
_PASSED_ON = ("mask", "bias", "is_causal", "scale", "softcap")
"""What an adapter can hand over as it is; of windows, lengths and caches every kernel has its own idea."""
_NEUTRAL: Mapping[str, str] = {
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate", "attn_dropout", "p_dropout"), "0.0"),
    **dict.fromkeys(("training", "is_training", "train"), "False"),
}
"""What conformance asks of parameters that the contract has not."""
_UNKNOWN = "..."
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class FunctionName:
    """The name of a function for an adapter: the words that name it, and what has to be imported, if anything."""

    called: str
    imported: str = ""
    is_taken: bool = False
    """True where the name ``attention`` is another's."""

    @property
    def adapter(self) -> str:
        """Return what the adapter is called there."""
        return "attention_for_attncheck" if self.is_taken else "attention"


@cache
def contract(name: str) -> Mapping[str, Any]:
    """Return the keywords of one of the contract's functions, and what each is when a case does not ask for it."""
    given = _CONTRACT[name].parameters
    return {each: given[each].default for each in given if each not in ("self", *INPUTS[name])}


def expected_signature(name: str) -> str:
    """Return the text of one of the contract's signatures, as a message shows it."""
    parameters = list(_CONTRACT[name].parameters.values())[1:]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return f"{name}{inspect.Signature(plain)}"


def required_keywords(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the contract's keywords that a function has no default for, as they are when nothing is asked."""
    known = {key: default for key, default in contract(name).items() if default is not inspect.Parameter.empty}
    return {each.name: known[each.name] for each in _beyond_inputs(name, function) if each.name in known}


def misfits(name: str, function: Callable[..., Any]) -> list[str]:
    """Return why a function can never be called as the contract says; empty where it can, or only calling tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []  # a builtin without a signature
    try:
        signature.bind_partial(*INPUTS[name])
    except TypeError:
        return [f"it does not take {listed(INPUTS[name])} by position"]
    swapped = [
        f"{each.name}, which stands where {wanted} comes"
        for each, wanted in zip(_positional(signature), INPUTS[name], strict=False)
        if wanted in _MEANS and _meaning(each.name) not in (None, wanted)
    ]
    beyond = _beyond_inputs(name, function)
    required = [each for each in beyond if each.name not in contract(name)]
    required += [each for each in beyond if each not in required and each.kind not in _NAMED]
    alike = {each.name: meant for each in required if (meant := _meaning(each.name)) not in (None, each.name)}
    looks = {called: f" and which looks like {meant}" for called, meant in alike.items()}
    return [*swapped, *(f"{each.name}, which it requires{looks.get(each.name, '')}" for each in required)]


def hints(name: str, function: Callable[..., Any]) -> list[str]:
    """Return what becomes of optional parameters that the contract has not, and which of its own they look like."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    own = [each.name for each in parameters if each.kind in _NAMED and each.default is not inspect.Parameter.empty]
    strange = [each for each in own if each not in contract(name) and each not in INPUTS[name]]
    known = {each for each in own if each in contract(name)}
    alike = {each: meant for each in strange if (meant := _meaning(each)) in contract(name) and meant not in known}
    others = [each for each in strange if each not in alike]
    unused = [
        f"its {each} is never given; if it is the contract's {meant}, call it so: without, cases that need {meant} are "
        "unsupported"
        for each, meant in alike.items()
    ]
    return [*unused, *([f"its {listed(others)} {'is' if len(others) == 1 else 'are'} never given"] if others else [])]


def adapter(function: Callable[..., Any], name: FunctionName, framework: str | None) -> list[str]:
    """Return the lines of a function that calls another one as attention is called, to be pasted.

    What cannot be guessed stands as ``...``, and a comment says so.
    """
    arguments, options = _arguments(inspect.signature(function))
    defaults = {each: contract("attention")[each] for each in options}
    taken = "".join(f", {each}={default!r}" for each, default in defaults.items())
    blanks = [each for each, expression in arguments if expression == _UNKNOWN]
    lines = [
        *([f"{name.imported}", "", ""] if name.imported else []),
        f"def {name.adapter}(query, key, value{', *' if taken else ''}{taken}):",
        *(["    # mask is boolean: true = may attend"] if "mask" in options else []),
        *([f"    # FILL IN what stands as ...: {', '.join(each or 'an input' for each in blanks)}"] if blanks else []),
        f"    return {name.called}({', '.join(f'{key}={code}' if key else code for key, code in arguments)})",
    ]
    return [*lines, *(["", "", f'{name.adapter}.framework = "{framework}"'] if framework else [])]


def _arguments(signature: inspect.Signature) -> tuple[list[tuple[str, str]], list[str]]:
    """Return an adapter's arguments, as name (empty: by position) and expression, and the options that they pass on."""
    arguments: list[tuple[str, str]] = []
    options: list[str] = []
    inputs = _inputs_by_place(signature)
    for number, each in enumerate(signature.parameters.values()):
        meant = _meaning(each.name)
        is_required = each.default is inspect.Parameter.empty
        if each.kind not in (*_POSITIONAL, *_NAMED) or not (is_required or meant in _PASSED_ON):
            continue
        expression = inputs.get(each.name) or _NEUTRAL.get(each.name.lower(), _UNKNOWN)
        if meant in _PASSED_ON and meant is not None and each.name not in inputs:
            expression = _passed_on(meant, each)
            options.append(meant)
        in_place = len(arguments) == number and not any(name for name, _ in arguments)
        by_position = in_place and each.name in inputs and each.kind in _POSITIONAL
        arguments.append(("" if by_position or each.kind is _POSITIONAL[0] else each.name, expression))
    return arguments, [each for each in contract("attention") if each in options]


def _inputs_by_place(signature: inspect.Signature) -> dict[str, str]:
    """Return which parameter is which of query, key and value: by name, else by place where all three must be there."""
    wanted = INPUTS["attention"]
    found = {each: meant for each in signature.parameters if (meant := _meaning(each)) in wanted and meant is not None}
    first = [each.name for each in _positional(signature)[: len(wanted)]]
    if len(first) == len(wanted) and all(_meaning(each) in (None, *wanted) for each in first):
        by_place = zip(first, wanted, strict=True)
        found |= {each: meant for each, meant in by_place if each not in found and meant not in found.values()}
    return found


def _passed_on(meant: str, parameter: inspect.Parameter) -> str:
    """Return what is given for an option: a kernel that has no None for the usual scale wants the number."""
    if meant == "scale" and parameter.default is not None:
        return "query.shape[-1] ** -0.5 if scale is None else scale"
    if meant == "softcap" and isinstance(parameter.default, int | float):
        return f"{parameter.default!r} if softcap is None else softcap"
    return meant


def _beyond_inputs(name: str, function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Return the parameters without a default behind those that are given by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ()
    given = _positional(signature)[: len(INPUTS[name])]
    rest = (each for each in signature.parameters.values() if each not in given)
    return [each for each in rest if each.default is inspect.Parameter.empty and each.kind in (*_POSITIONAL, *_NAMED)]


def _positional(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [each for each in signature.parameters.values() if each.kind in _POSITIONAL]


def _meaning(name: str) -> str | None:
    return _MEANS.get(name.lower())


def is_plain(name: str) -> bool:
    """Return whether a name can stand in code, also behind dots."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))
