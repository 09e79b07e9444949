"""The fit of a user's function to the contract's signatures, and an adapter if it does not fit.

Query, key and value are passed by position, so their names do not matter unless they name another order. Every keyword
is optional: a case that needs a missing one is unsupported. A function with further required parameters is refused.
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
from attncheck.common.wording import join_words
from attncheck.execution.environment import find_imports
from attncheck.execution.user_code import Target, UnfitError, unwrap_function
from attncheck.execution.worker import to_one_line
from attncheck.spec import OPERATIONS, OPTIONS, SCORE_SPECS, InputSpec, Operation, OptionSpec, ScoreSpec


def explain_unfit_function(error: UnfitError, target: Target, loaded: Any) -> str:
    """Return in several lines why a target is refused and, if it is attention, what to do."""
    lines = [to_one_line(str(error)), f"Mismatch: {to_one_line('; '.join(error.misfits))}."]
    called = target.attribute or error.name
    if error.name != "attention":
        return "\n".join(lines) + " Name the function to check: file.py:function." * inspect.ismodule(loaded)
    if hints := [*map(_other_operation_hint, _other_operations(error.function))]:
        return "\n".join([*lines, *hints])
    if not is_dotted_name(called):
        return "\n".join(lines)
    function_name = _name_for_adapter(target, error, called)
    framework = getattr(loaded, "framework", None) or find_imports(error.function).framework
    code = adapter_lines(error.function, function_name, framework if isinstance(framework, str) else None)
    if not code:
        missing = join_words(_inputs_without_parameter(error.function))
        lines.append(
            f"The function has no parameter for {missing}: add a parameter for each, or name another function."
        )
        return "\n".join(lines)
    return "\n".join([*lines, _adapter_instruction(target, function_name.adapter), "", *code])


def _other_operations(function: Callable[..., Any]) -> list[Operation]:
    """Return the operations, other than attention, that have a required parameter and find all of theirs by name."""
    required = {parameter.name for parameter in _required_beyond_inputs("attention", function)}
    called = {*inspect.signature(function).parameters, *INPUTS_BY_FUNCTION["attention"]} if required else set()
    operations = []
    for operation in OPERATIONS.values():
        names = [{name, *spec.synonyms} for name, spec in operation.inputs.items() if spec.required]
        further = set().union(*names).difference(INPUTS_BY_FUNCTION["attention"])
        if further & required and all(called & of_input for of_input in names) and not operation.computes_gradients:
            operations.append(operation)
    return operations


def _other_operation_hint(operation: Operation) -> str:
    name = operation.function_name
    return f"If the function computes {name}, name it {name}. Its inputs are passed by position: {signature_text(name)}"


def _name_for_adapter(target: Target, error: UnfitError, called: str) -> NameForAdapter:
    written = getattr(unwrap_function(error.function), "__globals__", {})
    if target.pickled or target.module.endswith(".py"):
        return NameForAdapter(called, is_taken="attention" in written)
    root = called.partition(".")[0]
    local_name = f"own_{root}" if root == "attention" else root
    imported = f"from {target.module} import {root}" + (f" as {local_name}" if local_name != root else "")
    return NameForAdapter(local_name + called[len(root) :], imported)


def _adapter_instruction(target: Target, name: str) -> str:
    if target.pickled:
        return f"Pass this adapter instead, {name}:"
    if not target.module.endswith(".py"):
        return f"Save this adapter in a file, such as adapter.py, and name adapter.py:{name} instead:"
    path, here = Path(target.module), Path.cwd().resolve()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"Paste this adapter at the end of the file, and name {shown}:{name} instead:"


_SPECS: tuple[ScoreSpec | Operation, ...] = (*SCORE_SPECS.values(), *OPERATIONS.values())
CONTRACT_FUNCTIONS = tuple(dict.fromkeys(spec.function_name for spec in _SPECS))
"""Every function of the contract that computes something."""
_CONTRACT: Mapping[str, inspect.Signature] = {
    name: inspect.signature(getattr(Backend, name)) for name in CONTRACT_FUNCTIONS
}
INPUTS_BY_FUNCTION: Mapping[str, tuple[str, ...]] = {name: inputs_of(name) for name in CONTRACT_FUNCTIONS}
"""Every function of the contract, and what it is given by position: its own names for these do not matter."""

_SPECS_BY_NAME: Mapping[str, InputSpec | OptionSpec] = {**OPERATIONS["attention"].inputs, **OPTIONS}
_NAME_OF_SYNONYM: Mapping[str, str] = {
    synonym: name for name, spec in _SPECS_BY_NAME.items() if spec.synonyms for synonym in (name, *spec.synonyms)
}
"""What public kernels call what the contract has, and what that is there."""
_OPTIONS_TO_PASS_ON = ("mask", "bias", "is_causal", "scale", "softcap")
"""What an adapter can hand over as it is; of windows, lengths and caches every kernel has its own idea."""
_NEUTRAL_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate", "attn_dropout", "p_dropout"), "0.0"),
    **dict.fromkeys(("training", "is_training", "train"), "False"),
}
"""What conformance asks of parameters that the contract has not."""
_UNKNOWN_ARGUMENT = "..."
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class NameForAdapter:
    """The name of a function for an adapter: the words that name it, and what has to be imported, if anything."""

    call_expression: str
    import_statement: str = ""
    is_taken: bool = False
    """True if the name ``attention`` is another's."""

    @property
    def adapter(self) -> str:
        """Return the name of the adapter."""
        return "attention_for_attncheck" if self.is_taken else "attention"


@cache
def contract_keywords(name: str) -> Mapping[str, Any]:
    """Return the keywords of one of the contract's functions, and what each is when a case does not ask for it."""
    parameters = _CONTRACT[name].parameters
    return {
        option: parameters[option].default for option in parameters if option not in ("self", *INPUTS_BY_FUNCTION[name])
    }


def signature_text(name: str) -> str:
    """Return the text of one of the contract's signatures, as a message shows it."""
    parameters = list(_CONTRACT[name].parameters.values())[1:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return f"{name}{inspect.Signature(plain)}"


def required_keywords(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the contract's keywords that a function has no default for, with the contract's defaults."""
    known = {key: default for key, default in contract_keywords(name).items() if default is not inspect.Parameter.empty}
    required = [parameter.name for parameter in _required_beyond_inputs(name, function)]
    return {option: known[option] for option in required if option in known}


def signature_faults(name: str, function: Callable[..., Any]) -> list[str]:
    """Return why a function can never be called by the contract; empty if it can, or if only a call can show it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []  # a builtin without a signature
    try:
        signature.bind_partial(*INPUTS_BY_FUNCTION[name])
    except TypeError:
        return [f"it does not take {join_words(INPUTS_BY_FUNCTION[name])} by position"]
    swapped = [
        f"parameter {parameter.name} at the position of {wanted}"
        for parameter, wanted in zip(_positional_parameters(signature), INPUTS_BY_FUNCTION[name], strict=False)
        if wanted in _NAME_OF_SYNONYM and _contract_name_of_parameter(parameter.name) not in (None, wanted)
    ]
    beyond = _required_beyond_inputs(name, function)
    required = [parameter for parameter in beyond if parameter.name not in contract_keywords(name)]
    required += [parameter for parameter in beyond if parameter not in required and parameter.kind not in _BY_KEYWORD]
    unknown = [parameter.name for parameter in required]
    alike = {
        called: meant for called in unknown if (meant := _contract_name_of_parameter(called)) not in (None, called)
    }
    looks = {called: f" (probably {meant})" for called, meant in alike.items()}
    return [*swapped, *(f"required parameter {called}{looks.get(called, '')}" for called in unknown)]


def unused_parameter_hints(name: str, function: Callable[..., Any]) -> list[str]:
    """Return notes on optional parameters that the contract does not have, and the keywords that they resemble."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    empty = inspect.Parameter.empty
    optional = [
        parameter.name for parameter in parameters if parameter.kind in _BY_KEYWORD and parameter.default is not empty
    ]
    strange = [
        word for word in optional if word not in contract_keywords(name) and word not in INPUTS_BY_FUNCTION[name]
    ]
    known = {option for option in optional if option in contract_keywords(name)}
    alike = {
        word: meant
        for word in strange
        if (meant := _contract_name_of_parameter(word)) in contract_keywords(name) and meant not in known
    }
    others = [option for option in strange if option not in alike]
    unused = [
        f"attncheck never passes its {option}; if it means the contract's {meant}, rename it to {meant}: otherwise "
        f"cases that need {meant} are unsupported"
        for option, meant in alike.items()
    ]
    return [
        *unused,
        *([f"attncheck never passes its {join_words(others)}"] if others else []),
    ]


def adapter_lines(function: Callable[..., Any], name: NameForAdapter, framework: str | None) -> list[str]:
    """Return the lines of an adapter with the signature of attention that calls another function, to be pasted.

    Unknown arguments are written as ``...``, and a comment lists them, with the inputs that are not passed yet. Empty
    if the function has no parameter for an input.
    """
    arguments, options = _adapter_arguments(inspect.signature(function))
    missing = _inputs_without_parameter(function)
    defaults = {option: contract_keywords("attention")[option] for option in options}
    taken = "".join(f", {option}={default!r}" for option, default in defaults.items())
    blanks = [called or "an input" for called, expression in arguments if expression == _UNKNOWN_ARGUMENT]
    if missing and not blanks:
        return []
    unpassed = f" (not passed yet: {join_words(missing)})" if missing else ""
    lines = [
        *([f"{name.import_statement}", "", ""] if name.import_statement else []),
        f"def {name.adapter}(query, key, value{', *' if taken else ''}{taken}):",
        *(["    # mask is boolean: true = may attend"] if "mask" in options else []),
        *([f"    # FILL IN what stands as ...: {', '.join(blanks)}{unpassed}"] if blanks else []),
        f"    return {name.call_expression}({', '.join(f'{key}={code}' if key else code for key, code in arguments)})",
    ]
    return [*lines, *(["", "", f'{name.adapter}.framework = "{framework}"'] if framework else [])]


def _adapter_arguments(signature: inspect.Signature) -> tuple[list[tuple[str, str]], list[str]]:
    """Return an adapter's arguments, as name (empty: by position) and expression, and the options that they pass on."""
    arguments: list[tuple[str, str]] = []
    options: list[str] = []
    inputs = _input_of_parameter(signature)
    for number, parameter in enumerate(signature.parameters.values()):
        meant = _contract_name_of_parameter(parameter.name)
        is_required = parameter.default is inspect.Parameter.empty
        is_passed = is_required or parameter.name in inputs or meant in _OPTIONS_TO_PASS_ON
        if parameter.kind not in (*_BY_POSITION, *_BY_KEYWORD) or not is_passed:
            continue
        expression = inputs.get(parameter.name) or _NEUTRAL_ARGUMENTS.get(parameter.name.lower(), _UNKNOWN_ARGUMENT)
        if meant in _OPTIONS_TO_PASS_ON and meant is not None and parameter.name not in inputs:
            expression = _option_expression(meant, parameter)
            options.append(meant)
        in_place = len(arguments) == number and not any(name for name, _ in arguments)
        by_position = in_place and parameter.name in inputs and parameter.kind in _BY_POSITION
        arguments.append(("" if by_position or parameter.kind is _BY_POSITION[0] else parameter.name, expression))
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    if takes_any and all(expression != _UNKNOWN_ARGUMENT for _, expression in arguments):
        arguments += [(name, name) for name in INPUTS_BY_FUNCTION["attention"] if name not in inputs.values()]
    return arguments, [option for option in contract_keywords("attention") if option in options]


def _inputs_without_parameter(function: Callable[..., Any]) -> list[str]:
    """Return the inputs of attention that an adapter cannot pass to a function."""
    passed = {expression for _, expression in _adapter_arguments(inspect.signature(function))[0]}
    return [name for name in INPUTS_BY_FUNCTION["attention"] if name not in passed]


def _input_of_parameter(signature: inspect.Signature) -> dict[str, str]:
    """Return the parameters that are query, key and value: by name, else by position if all three must be there."""
    wanted = INPUTS_BY_FUNCTION["attention"]
    by_name = {called: _contract_name_of_parameter(called) for called in signature.parameters}
    meanings = {called: meant for called, meant in by_name.items() if meant is not None and meant in wanted}
    first = [parameter.name for parameter in _positional_parameters(signature)[: len(wanted)]]
    if len(first) == len(wanted) and all(_contract_name_of_parameter(called) in (None, *wanted) for called in first):
        by_place = zip(first, wanted, strict=True)
        known = {*meanings.values()}
        meanings |= {called: meant for called, meant in by_place if called not in meanings and meant not in known}
    return meanings


def _option_expression(meant: str, parameter: inspect.Parameter) -> str:
    """Return the expression for an option; a kernel whose scale cannot be None gets the number."""
    if meant == "scale" and parameter.default is not None:
        return "query.shape[-1] ** -0.5 if scale is None else scale"
    if meant == "softcap" and isinstance(parameter.default, int | float):
        return f"{parameter.default!r} if softcap is None else softcap"
    return meant


def _required_beyond_inputs(name: str, function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Return the parameters without a default after the inputs, which are passed by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ()
    by_position = _positional_parameters(signature)[: len(INPUTS_BY_FUNCTION[name])]
    rest = (parameter for parameter in signature.parameters.values() if parameter not in by_position)
    required = (parameter for parameter in rest if parameter.default is inspect.Parameter.empty)
    return [parameter for parameter in required if parameter.kind in (*_BY_POSITION, *_BY_KEYWORD)]


def _positional_parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [parameter for parameter in signature.parameters.values() if parameter.kind in _BY_POSITION]


def _contract_name_of_parameter(name: str) -> str | None:
    return _NAME_OF_SYNONYM.get(name.lower())


def is_dotted_name(name: str) -> bool:
    """Return whether a name can stand in code, also behind dots."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in name.split("."))
