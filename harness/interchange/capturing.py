"""Calls of attention in a user's model, written as cases.

    attention = attncheck.capture(torch.nn.functional.scaled_dot_product_attention, "captured/")

``attention`` has the arguments and the result of the function. Its first call writes a case file and an .npz file with
its arrays and its result to ``captured/``. ``attncheck check captured/`` runs the case on every implementation.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attncheck.backends import BACKENDS, as_numpy
from attncheck.common.errors import UsageError
from attncheck.common.wording import slug
from attncheck.execution.operations import run_operation
from attncheck.reading.loader import load_case_file
from attncheck.reading.lowering import Array
from attncheck.reading.printed import MAX_NUMBERS
from attncheck.reading.problem import Problem
from attncheck.reading.written_cases import format_case_file, pack_npz
from attncheck.spec import DTYPES, OPERATIONS, OPTIONS, input_specs

Layout = Literal["heads_first", "length_first"]

_INPUT_SPECS = input_specs("attention", None)
_REQUIRED_INPUTS = tuple(name for name, spec in _INPUT_SPECS.items() if spec.required)
_PER_HEAD_INPUTS = frozenset(
    name for name, spec in _INPUT_SPECS.items() if len(spec.axes) == 4 and not spec.is_broadcastable
)
_INPUT_SYNONYMS: Mapping[str, str] = {
    **{name: name for name in _INPUT_SPECS},
    **{
        synonym: name
        for name, spec in _INPUT_SPECS.items()
        if spec.required or spec.plain_name
        for synonym in spec.synonyms
    },
}
"""The argument names of functions -> the inputs of attention."""
_OPTION_SYNONYMS: Mapping[str, str] = {
    synonym: name
    for name, spec in ((name, OPTIONS[name]) for name in sorted(OPERATIONS["attention"].options))
    if spec.plain_name or name == "scale"
    for synonym in (name, *spec.synonyms)
}
_IGNORED_ARGUMENTS = frozenset({"enable_gqa", "training", "implementation", "dropout_p", "dropout"})
"""Arguments that change no number, except for a dropout above 0."""
_KNOWN_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": (*_REQUIRED_INPUTS, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
}


_NO_CALL = (
    "no call of {} was captured: nothing called the function that capture returned. Put it in the place from which the "
    "model calls the original. In torch.nn.MultiheadAttention, also call "
    "torch.backends.mha.set_fastpath_enabled(False), and pass need_weights=False to the module"
)
"""The warning when the captured function is dropped, or the program ends, without a call."""


class CaptureWarning(UserWarning):
    """A call, or a part of one, was not written; the model goes on."""


class Capture:
    """A function that writes calls of attention as cases, and otherwise behaves like the function that it wraps.

    Attributes:
        files: The case files that were written.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        folder: Path,
        calls: int,
        layout: Layout,
        alignment: str | None,
        place: tuple[str, int],
    ) -> None:
        """Wrap a function; ``place`` is the file and line that a warning names if nothing calls it."""
        self.files: list[Path] = []
        self.__wrapped__ = function
        self.__name__ = str(getattr(function, "__name__", "attention"))
        self._folder, self._layout, self._alignment = folder, layout, alignment
        self._remaining = calls
        self._lock = threading.Lock()
        warning = _NO_CALL.format(self.__name__)
        self._warn_unless_called = weakref.finalize(
            self, lambda: warnings.warn_explicit(warning, CaptureWarning, *place)
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Write the call if it is one of the first, and return the result of the function."""
        self._warn_unless_called.detach()
        with self._lock:
            is_written, self._remaining = self._remaining > 0, max(0, self._remaining - 1)
            call = self._copy_arguments(arguments, named) if is_written else None
        result = None
        try:
            result = self.__wrapped__(*arguments, **named)
        finally:
            if call is not None:
                with self._lock:
                    self._write_call(call, result)
        return result

    def _copy_arguments(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> _CapturedCall | None:
        """Copy the arguments before the function can change them."""
        try:
            return _CapturedCall(
                _arguments_by_name(self.__wrapped__, self.__name__, arguments, named), self._layout, self._alignment
            )
        except Exception as error:  # any error of a tensor under tracing: the model must not stop here
            self._warn_unwritten(error)
            return None

    def _write_call(self, call: _CapturedCall, result: Any) -> None:
        try:
            if result is not None:
                call.set_result(result)
            self._folder.mkdir(parents=True, exist_ok=True)
            self.files.append(_write_case(call, self._folder, self.__name__))
        except Exception as error:  # the model must not stop here either
            self._warn_unwritten(error, _matching_declaration(call))
            return
        for reason in call.left_out:
            _warn(f"{self.files[-1].name} is not the complete call: {reason}")
        if meant := _matching_declaration(call):
            _warn(f"the output in {self.files[-1].name} fits the call only with {meant}; pass it to capture")

    def _warn_unwritten(self, error: Exception, meant: str = "") -> None:
        instead = f"; pass {meant} to capture" if meant else ""
        _warn(f"a call of {self.__name__} was not captured: {type(error).__name__}: {error}{instead}")


def capture(
    function: Callable[..., Any],
    folder: str | Path,
    *,
    calls: int = 1,
    layout: Layout = "heads_first",
    alignment: Literal["top_left", "bottom_right"] | None = None,
) -> Capture:
    """Wrap a function so that its first calls are written as cases.

    ``attncheck check FOLDER`` then runs the cases. The arrays may be arrays of NumPy, torch, TensorFlow or JAX. A call
    inside a compiled function has no numbers, and is not written. Arguments that a case cannot express are left out; a
    ``CaptureWarning`` and a note in the case list them. If a call cannot be written, or if the function is never
    called, there is also a ``CaptureWarning``; the model continues. The result of the function, or the first of several
    results, is the expected output of the case.

    Args:
        function: A function of query, key and value. Its arguments may have the names that torch, JAX and
            flash-attention use. In a Boolean mask, true allows a query to attend to a key. A mask of numbers is a bias;
            if it contains only 0 and minus infinity, the case has the Boolean mask.
        folder: The folder for the case files and their arrays. Existing files are not overwritten.
        calls: The number of calls to write.
        layout: The axes of the arrays: (B, H, L, D) for ``heads_first``, (B, L, H, D) for ``length_first``.
        alignment: The position of the first query for causality and windows, if there are fewer queries than keys.
            Default: ``top_left``, as in torch; flash-attention has ``bottom_right``.

    Returns:
        The wrapped function. Its attribute ``files`` lists the case files.

    Raises:
        UsageError: If ``function`` is not callable or is a module with weights, or for an invalid ``layout`` or
            ``calls``.
    """
    if not callable(function):
        raise UsageError(f"expected a function, got {type(function).__name__}")
    if callable(getattr(owner := getattr(function, "__self__", function), "state_dict", None)):
        raise UsageError(
            f"expected a function of query, key and value, got a {type(owner).__name__}, which contains weights; "
            "capture the function that it calls, such as torch.nn.functional.scaled_dot_product_attention, or write "
            "its weights into a case of multi_head_attention"
        )
    if layout not in ("heads_first", "length_first") or calls < 1:
        raise UsageError(f"expected layout heads_first or length_first, and calls >= 1, got {layout!r} and {calls}")
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    place = (caller.f_code.co_filename, caller.f_lineno) if caller else ("attncheck.capture", 1)
    return Capture(function, Path(folder), calls, layout, alignment, place)


class _CapturedCall:
    """One call in the form of a case: inputs, options, the dtype of the query, and notes on omitted arguments."""

    def __init__(self, arguments: Mapping[str, Any], layout: Layout, alignment: str | None) -> None:
        self.inputs: dict[str, Array] = {}
        self.output: Array | None = None
        self.layout = layout
        self.options: dict[str, Any] = {}
        self.left_out: list[str] = []
        for name, value in arguments.items():
            if value is not None:
                self._add_argument(name, value)
        missing = [name for name in _REQUIRED_INPUTS if name not in self.inputs]
        if missing:
            raise ValueError(f"expected an argument named {missing[0]}")
        self.dtype = self.inputs["query"].dtype.name
        if self.dtype not in DTYPES:
            raise ValueError(f"the query has dtype {self.dtype}; expected one of {', '.join(DTYPES)}")
        if alignment is not None and self.options.keys() & {"is_causal", "window"}:
            self.options["alignment"] = alignment
        for name, array in self.inputs.items():
            if array.dtype.kind in "fV" and array.dtype.name != self.dtype:
                how = "widened" if array.dtype.itemsize < self.inputs["query"].dtype.itemsize else "rounded"
                self.left_out.append(f"{name} has dtype {array.dtype.name}, and is {how} to {self.dtype} in the case")

    def set_result(self, result: Any) -> None:
        """Store the result of the function. Raises ``ValueError`` if attention has no result of that shape."""
        array = as_numpy(result[0] if isinstance(result, tuple | list) else result)
        array = array.swapaxes(-2, -3) if self.layout == "length_first" and array.ndim > 2 else array
        expected = (*self.inputs["query"].shape[:-1], self.inputs["value"].shape[-1])
        if array.shape != expected:
            raise ValueError(f"expected an output of shape {expected}, got {array.shape}")
        if array.dtype.name == self.dtype and 0 < array.size <= MAX_NUMBERS and _is_finite(array):
            self.output = array.copy()

    def _add_argument(self, name: str, value: Any) -> None:
        """Store one argument, or note why it is left out."""
        if name in _INPUT_SYNONYMS:
            array = as_numpy(value).copy()
            input_name = _INPUT_SYNONYMS[name]
            if input_name in ("mask", "bias") and _is_additive_mask(array):
                input_name, array = "mask", array == 0
            elif input_name == "mask" and array.dtype != bool:
                input_name = "bias"
            if input_name in self.inputs:  # two masks, or a mask of numbers and a bias
                before = self.inputs[input_name]
                self.inputs[input_name] = before & array if input_name == "mask" else before + array
                return
            is_turned = input_name in _PER_HEAD_INPUTS and self.layout == "length_first"
            self.inputs[input_name] = array.swapaxes(-2, -3) if is_turned else array
        elif name in _OPTION_SYNONYMS:
            self._add_option(_OPTION_SYNONYMS[name], value)
        elif value is not False and (name not in _IGNORED_ARGUMENTS or (name.startswith("dropout") and value)):
            self.left_out.append(f"a case cannot express {name}={_abbreviate(value)}")

    def _add_option(self, name: str, value: Any) -> None:
        if name == "window":
            sides = (value, value) if isinstance(value, int) else tuple(value)
            window = [None if side is None or side < 0 else int(side) for side in sides]
            self.options |= {name: window} if window != [None, None] else {}
        elif name == "is_causal":
            self.options |= {name: True} if value else {}
        elif name != "softcap" or value:  # 0 means none in flash-attention
            self.options[name] = float(value)


def _matching_declaration(call: _CapturedCall) -> str:
    """Return the layout or alignment that explains a call's output, if the given one does not."""
    if call.output is None or _has_output(call.output, call.inputs, call.options):
        return ""
    corner = {**call.options, "alignment": "bottom_right"}
    if "alignment" not in call.options and _has_output(call.output, call.inputs, corner):
        return 'alignment="bottom_right"'
    layout = "heads_first" if call.layout == "length_first" else "length_first"
    turned = {
        name: array.swapaxes(-2, -3) if name in _PER_HEAD_INPUTS else array for name, array in call.inputs.items()
    }
    for options, alignment in ((call.options, ""), (corner, ', alignment="bottom_right"')):
        if call.output.ndim > 2 and _has_output(call.output.swapaxes(-2, -3), turned, options):
            return f'layout="{layout}"{alignment}'
    return ""


def _has_output(output: Array, inputs: Mapping[str, Array], options: Mapping[str, Any]) -> bool:
    """Return whether attention has this output, to a hundredth of its numbers."""
    wide = {name: array.astype("float64") if array.dtype.kind in "fV" else array for name, array in inputs.items()}
    with suppress(Exception), np.errstate(all="ignore"):  # shapes do not fit, or NumPy does not support it
        called = Problem("attention", options, wide).as_call()
        computed = run_operation(BACKENDS["numpy"].load(), "attention", called.inputs, called.options)["output"]
        largest = float(np.abs(computed).max(initial=0))
        has_shape = computed.shape == output.shape
        return has_shape and bool(np.allclose(output.astype("float64"), computed, 0.01, 0.01 * largest))
    return False


def _arguments_by_name(
    function: Callable[..., Any], name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name; for a function without a signature, by its known order."""
    try:
        bound = inspect.signature(function).bind(*arguments, **named)
    except ValueError:  # a builtin
        order = _KNOWN_PARAMETERS.get(name, _REQUIRED_INPUTS)
        places = [*order, *(f"argument {place + 1}" for place in range(len(order), len(arguments)))]
        return {**dict(zip(places, arguments, strict=False)), **named}
    by_name: dict[str, Any] = {}
    for parameter, value in bound.arguments.items():
        kind = bound.signature.parameters[parameter].kind
        by_name |= value if kind is inspect.Parameter.VAR_KEYWORD else {parameter: value}
    return by_name


def _write_case(call: _CapturedCall, folder: Path, function: str) -> Path:
    """Write a case and its arrays under the first free number, and read the case back."""
    name, number = slug(function) or "attention", 1
    while (path := folder / f"{name}-{number}.yaml").exists() or path.with_suffix(".npz").exists():
        number += 1
    arrays = path.with_suffix(".npz")
    output = {} if call.output is None else {"output": call.output}
    content, checksum = pack_npz({**call.inputs, **output})
    try:
        with arrays.open("xb") as file:
            file.write(content)
        place = {"file": arrays.name, "sha256": checksum}
        path.write_text(format_case_file(_case_file_content(call, function, number, place)), encoding="utf-8")
        load_case_file(path, path.name, name, ())
    except Exception:
        arrays.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise
    return path


def _case_file_content(call: _CapturedCall, function: str, number: int, place: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of a case file; ``place`` has the file of its arrays and the checksum."""
    numbers = (array for array in call.inputs.values() if array.dtype.kind != "b")
    entry = {
        "name": f"Call {number} of {function}",
        "inputs": {name: {**place, "name": name} for name in call.inputs},
        "options": call.options,
        "dtypes": [call.dtype],
        "computed_in": None if call.output is None else call.dtype,  # its result has this dtype
        "expect": None if call.output is None else [{"stage": "output", "printed": {**place, "name": "output"}}],
        "allow_nonfinite": any(not _is_finite(array) for array in numbers),
        "notes": call.left_out,
    }
    source = {"kind": "derivation", "title": f"A call of {function}, captured in a model"}
    cases = [{name: value for name, value in entry.items() if value}]
    return {"title": f"Calls of {function}", "source": source, "operation": "attention", "cases": cases}


def _is_additive_mask(array: Array) -> bool:
    """Return whether an array of numbers forbids keys by minus infinity and is 0 elsewhere.

    A row that forbids every key is no such mask: frameworks return NaN for it, and zeros for a Boolean mask.
    """
    if array.dtype == bool or array.ndim < 2:
        return False
    forbids = array == -np.inf
    return bool(forbids.any() and (forbids | (array == 0)).all() and not forbids.all(-1).any())


def _is_finite(array: Array) -> bool:
    return bool(np.isfinite(array.astype(np.float64)).all())


def _abbreviate(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | tuple) else type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def _warn(message: str) -> None:
    warnings.warn(message, CaptureWarning, stacklevel=4)
