"""Load a function and call it with arrays, as requests on standard input ask; answer on standard output.

This file runs as a script, copied into an empty folder, in a process that loads no other module of its project. So the
function that it calls finds nothing that tells a test from any other program. It imports only the standard library,
NumPy, and what the function's framework needs.

A request is a length (8 bytes, big endian) and a pickled dictionary. An answer is a length, a JSON object, and the
arrays that the object lists, one after the other, in C order.

Around each call, the script observes what the caller of a function cannot see in its result: changed inputs, results
that are memory of an input, and results that change after the call has returned.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from numpy.typing import NDArray

    Array = NDArray[Any]

FREE_BYTE = 0x7E
"""Free memory is filled with it: about 8e37 in float32, 1e301 in float64, NaN in float16."""
CHANGED_INPUT, SHARED_MEMORY = "changes-inputs", "returns-input-memory"
OVERWRITTEN, LATE = "reuses-output-memory", "returns-before-finished"
_HELD_RESULTS, _MAX_HELD_BYTES = 6, 1 << 26
"""Results that are compared again after later calls, and the bytes of all of them together."""
_SECONDS_TO_FINISH = 0.05
"""Time after which a result may no longer change."""
_FIRST_DELAYED_CHECKS, _DELAYED_CHECK_INTERVAL = 12, 64
"""Calls after which the script waits so long: the first ones, and then one of so many."""
_MAX_OVERLAP_WORK = 10_000
"""Steps in which NumPy may decide if two arrays overlap, which can take exponential time."""
_M_PERTURB = -6
"""``M_PERTURB`` of glibc's malloc.h: what free memory is filled with."""
_CACHED_BLOCK_BYTES, _BLOCKS_TO_FILL = 1 << 10, 8
"""NumPy keeps up to seven blocks of each size below this one for itself."""
_PACKAGES_WITH_ATTENTION = frozenset(
    [
        "torch",
        "jax",
        "flax",
        "haiku",
        "equinox",
        "tokamax",
        "tensorflow",
        "keras",
        "transformers",
        "diffusers",
        "timm",
        "xformers",
        "flash_attn",
        "flashinfer",
        "torchtune",
        "vllm",
        "sglang",
        "tinygrad",
        "mlx",
        "paddle",
        "onnxruntime",
        "x_transformers",
        "sageattention",
        "natten",
    ]
)
_TORCH_OPERATION = re.compile(r"::(?!_)\w*attention|::_native_multi_head_attention", re.IGNORECASE)
"""Public operations of torch; those that they call in turn begin with an underscore."""
_ATTENTION_NAME = re.compile(r"attention|attend|sdpa|(^|_)mha(_|$)|flash_fwd", re.IGNORECASE)


def serve() -> None:
    """Answer requests until there are no more."""
    with suppress(OSError):
        Path(__file__).unlink()
        Path(__file__).parent.rmdir()
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    while len(size := source.read(8)) == 8:
        request = pickle.loads(source.read(int.from_bytes(size, "big")))
        kind = request.pop("kind")
        header: dict[str, Any]
        arrays: list[Array] = []
        if kind == "load":
            answer = load(**request)
            header = {"loaded": answer} if isinstance(answer, dict) else {"failed": answer}
        elif kind == "prepare":
            try:
                prepare_framework(**request)
                header = {}
            except Exception as error:
                header = {"failed": f"{type(error).__name__}: {message_of(error)}"}
        else:
            header, arrays = call(**request)
        write_answer(sink, header, arrays)


def write_answer(sink: IO[bytes], header: Mapping[str, Any], arrays: Sequence[Array]) -> None:
    """Write a header and the arrays that it lists."""
    text = json.dumps(header).encode()
    sink.write(len(text).to_bytes(8, "big") + text)
    for array in arrays:
        sink.write(array.tobytes())
    sink.flush()


class ServerState:
    """The loaded functions, the framework's conversions, and results of earlier calls that may not change."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}
    framework: ClassVar[str] = ""
    convert: ClassVar[Callable[[Array, Array | None], Any]]
    to_numpy: ClassVar[Callable[[Any], Array]]
    pointer: ClassVar[Callable[[Any], Any]]
    held: ClassVar[deque[tuple[int, dict[str, Any], dict[str, Array]]]] = deque()
    calls: ClassVar[int] = 0


def load(
    *,
    module: str,
    attribute: str,
    pickled: bytes,
    framework: str,
    device: str,
    folders: Sequence[str],
    names: Sequence[str],
) -> dict[str, Any] | str:
    """Load a target; return the parameters of its functions by their names, or a text that says why it failed."""
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    try:
        use_framework(framework, device)
        target = find_target(module, attribute, pickled)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    functions = {name: getattr(target, name) for name in names if callable(getattr(target, name, None))}
    if not inspect.ismodule(target) and callable(target):
        functions[""] = target
    ServerState.functions = functions
    return {name: describe_parameters(function) for name, function in functions.items()}


def find_target(module: str, attribute: str, pickled: bytes) -> Any:
    """Import a module or a file as other programs do, and return the attribute that is named."""
    if pickled:
        import cloudpickle

        return cloudpickle.loads(pickled)
    if module.endswith(".py"):
        name = Path(module).stem
        specification = importlib.util.spec_from_file_location(name, module)
        assert specification is not None, "a path to a file of Python"
        assert specification.loader is not None, "a path to a file of Python"
        target: Any = importlib.util.module_from_spec(specification)
        sys.modules[name] = target
        specification.loader.exec_module(target)
    else:
        target = importlib.import_module(module)
    for part in filter(None, attribute.split(".")):
        target = getattr(target, part)
    return target


def describe_parameters(function: Callable[..., Any]) -> list[list[Any]] | None:
    """Return name, kind, and whether there is a default, of each parameter; None if a builtin does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[item.name, int(item.kind), item.default is not inspect.Parameter.empty] for item in parameters]


def use_framework(framework: str, device: str) -> None:
    """Set how arrays are converted to a framework's."""
    ServerState.framework, ServerState.convert, ServerState.to_numpy, ServerState.pointer = (
        framework,
        keep_array,
        as_numpy,
        numpy_pointer,
    )
    if framework == "torch":
        ServerState.convert = lambda array, memory: torch_tensor(array, memory, device)
        ServerState.to_numpy, ServerState.pointer = torch_to_numpy, torch_pointer
    elif framework == "jax":
        import jax

        place = jax.devices(device.partition(":")[0])[int(device.partition(":")[2] or 0)] if device else None
        ServerState.convert = lambda array, memory: jax.device_put(array.copy(), place)
        ServerState.pointer = lambda tensor: None  # arrays of JAX cannot be changed, so it is no fault to return one
    elif framework == "tensorflow":
        import tensorflow

        ServerState.convert = lambda array, memory: tensorflow.constant(array)
        ServerState.pointer = lambda tensor: None


def prepare_framework(dtype: str, threads: int) -> None:
    """Limit the threads of the framework, and switch types of 64 bits on where they are used."""
    if ServerState.framework == "torch":
        import torch

        torch.set_num_threads(threads)
    elif ServerState.framework == "jax":
        import jax

        os.environ["PJRT_NPROC"] = str(threads)
        jax.config.update("jax_enable_x64", dtype == "float64")
    elif ServerState.framework == "tensorflow":
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(threads)
        tensorflow.config.threading.set_inter_op_parallelism_threads(threads)


def keep_array(array: Array, memory: Array | None) -> Any:
    """Return an array of NumPy as it is."""
    return array


def as_numpy(tensor: Any) -> Array:
    """Return the numbers of an array, also of another framework's that NumPy can read."""
    import numpy as np

    if hasattr(tensor, "detach"):  # of torch, though the function is given NumPy's
        return torch_to_numpy(tensor)
    return np.asarray(tensor)


def numpy_pointer(tensor: Any) -> Any:
    """Return the array itself: ``np.shares_memory`` compares arrays."""
    import numpy as np

    return tensor if isinstance(tensor, np.ndarray) else None


_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}
"""Types that torch takes from NumPy only as bits."""


def torch_tensor(array: Array, memory: Array | None, device: str) -> Any:
    """Return a tensor with the strides and the storage offset of an array, whose memory is a flat array."""
    import numpy as np
    import torch

    if min(array.strides, default=0) < 0 or any(stride % array.itemsize for stride in array.strides):
        array, memory = array.copy(), None
    if memory is None or not array.size:
        memory = np.ascontiguousarray(array).reshape(-1)
        strides, offset = [stride // array.itemsize for stride in np.ascontiguousarray(array).strides], 0
    else:
        strides = [stride // array.itemsize for stride in array.strides]
        offset = (address_of(array) - address_of(memory)) // array.itemsize
    name = array.dtype.name
    flat = torch.from_numpy(memory.view(_BITS[name]) if name in _BITS else memory)
    flat = flat.view(getattr(torch, name)) if name in _BITS else flat
    tensor = flat.as_strided(array.shape, strides, offset)
    return tensor.to(device) if device else tensor


def torch_to_numpy(tensor: Any) -> Array:
    """Return the numbers of a tensor."""
    import numpy as np

    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).partition(".")[2]
    if name not in _BITS:
        array: Array = tensor.numpy()
        return array
    import ml_dtypes
    import torch

    bits: Array = tensor.view(getattr(torch, _BITS[name])).numpy()
    return bits.view(getattr(ml_dtypes, name))


def torch_pointer(tensor: Any) -> Any:
    """Return the address of the memory of a tensor."""
    return tensor.untyped_storage().data_ptr() if hasattr(tensor, "untyped_storage") else None


def address_of(array: Array) -> int:
    """Return the address of the first element of an array."""
    return int(array.__array_interface__["data"][0])


def call(
    name: str, positional: Mapping[str, Any], keywords: Mapping[str, Any], memories: Sequence[bytes], observes: bool
) -> tuple[dict[str, Any], list[Array]]:
    """Call a function; return the header of the answer and the arrays that it lists.

    Arrays among the arguments are lists of a dtype, a shape, strides and an offset into one of the ``memories``.
    """
    number, ServerState.calls, process = ServerState.calls, ServerState.calls + 1, os.getpid()
    notes = [[LATE, text] for text in changed_results("changed before the next call began")]
    flat = [aligned_copy(memory) for memory in memories]
    inputs: dict[str, Any] = {}
    arguments = [to_tensor(value, flat, inputs, key) for key, value in positional.items()]
    named = {key: to_tensor(value, flat, inputs, key) for key, value in keywords.items()}
    before = {key: bits_of(tensor) for key, tensor in inputs.items()}
    try:
        with filled_memory({len(memory) for memory in memories}), observed_attention(observes) as delegates:
            try:
                returned = ServerState.functions[name](*arguments, **named)
            finally:
                if os.getpid() != process:  # a forked child came back from the call: its parent answers
                    os._exit(0)
        parts = named_parts(returned)
        copies = {key: copy_of(tensor) for key, tensor in parts.items()}
    except BaseException as error:
        header = {"error": type(error).__name__, "message": message_of(error)}
        return {**header, "notes": notes + changed_inputs(inputs, before)}, []
    notes += changed_inputs(inputs, before)
    notes += [[SHARED_MEMORY, text] for text in shared_memory(parts, inputs)]
    if number < _FIRST_DELAYED_CHECKS or number % _DELAYED_CHECK_INTERVAL == 0:
        time.sleep(_SECONDS_TO_FINISH)
        late = [key for key, tensor in parts.items() if bits_of(tensor) != copies[key].tobytes()]
        notes += [[LATE, f"{key or 'the result'} still changed after the call had returned"] for key in late]
    notes += [[OVERWRITTEN, text] for text in changed_results("was overwritten by a later call")]
    remember_result(number, parts, copies)
    kind = "dict" if isinstance(returned, dict) else "tuple" if isinstance(returned, (tuple, list)) else ""
    listed = [[key, str(array.dtype), list(array.shape)] for key, array in copies.items()]
    facts = {"arrays": listed, "notes": notes, "delegates": sorted(delegates)}
    return {"kind": kind, **facts}, list(copies.values())


def named_parts(returned: Any) -> dict[str, Any]:
    """Return the arrays of a result by their names: keys of a dictionary, positions in a tuple, or an empty one."""
    if isinstance(returned, dict):
        return {str(key): value for key, value in returned.items()}
    if isinstance(returned, (tuple, list)):
        return {str(place): value for place, value in enumerate(returned) if value is not None}
    return {"": returned}


def copy_of(tensor: Any) -> Array:
    """Return a copy of the numbers of a result. Raises ``TypeError`` for anything that has none."""
    import numpy as np

    if isinstance(tensor, (list, tuple, str, bytes, type(None))):
        raise TypeError(f"returned a {type(tensor).__name__}; expected an array, or a dict of stages that are arrays")
    array = np.array(ServerState.to_numpy(tensor))
    if array.dtype.kind not in "biufc" and array.dtype.name not in _BITS:
        raise TypeError(f"returned an array of {array.dtype}, expected numbers")
    return array


def message_of(error: BaseException) -> str:
    """Return the message of an error, shortened; messages may raise errors, too."""
    try:
        return str(error)[:2000]
    except Exception:
        return ""


def aligned_copy(memory: bytes) -> Array:
    """Copy some bytes into memory that begins at a multiple of 64 bytes, as frameworks have it."""
    import numpy as np

    room = np.empty(len(memory) + 64, np.uint8)
    start = -address_of(room) % 64
    part = room[start : start + len(memory)]
    part[...] = np.frombuffer(memory, np.uint8)
    return part


def to_tensor(value: Any, memories: Sequence[Array], inputs: dict[str, Any], name: str) -> Any:
    """Return an argument as the framework has it; arrays are collected in ``inputs``."""
    if not (isinstance(value, tuple) and value[:1] == ("array",)):
        return value
    import numpy as np

    _, memory, dtype, shape, strides, offset = value
    if dtype.startswith(("bfloat16", "float8")):
        import ml_dtypes

        dtype = getattr(ml_dtypes, dtype)
    kind = np.dtype(dtype)
    whole = memories[memory]
    array = np.ndarray(tuple(shape), kind, whole.data if whole.size else b"", offset, tuple(strides))
    usable = whole[: whole.size // kind.itemsize * kind.itemsize]
    tensor = ServerState.convert(array, usable.view(kind) if offset % kind.itemsize == 0 and usable.size else None)
    inputs[name] = tensor
    return tensor


def bits_of(tensor: Any) -> bytes:
    """Return the bits of a tensor."""
    return ServerState.to_numpy(tensor).tobytes()


def changed_inputs(inputs: Mapping[str, Any], before: Mapping[str, bytes]) -> list[list[str]]:
    """Return a note for each input that is not as it was before the call."""
    notes = []
    for name, tensor in inputs.items():
        try:
            if bits_of(tensor) != before[name]:
                notes.append([CHANGED_INPUT, f"the call changed its input {name}"])
        except Exception as error:
            notes.append([CHANGED_INPUT, f"the call made its input {name} unusable: {type(error).__name__}"])
    return notes


def shared_memory(parts: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each result that is memory of an input."""
    import numpy as np

    for key, tensor in parts.items():
        place = ServerState.pointer(tensor)
        for name, tensor_of_input in inputs.items():
            other = ServerState.pointer(tensor_of_input)
            if place is None or other is None:
                continue
            if isinstance(place, np.ndarray):
                most: Any = _MAX_OVERLAP_WORK  # any number, whatever NumPy's types say
                try:
                    is_same = np.shares_memory(place, other, max_work=most)
                except np.exceptions.TooHardError:
                    is_same = False
            else:
                is_same = place == other != 0
            if is_same:
                yield f"{key or 'the result'} is memory of the input {name}"


def remember_result(number: int, parts: dict[str, Any], copies: dict[str, Array]) -> None:
    """Keep a result, to compare it again after later calls."""
    ServerState.held.append((number, parts, copies))
    while len(ServerState.held) > _HELD_RESULTS or (
        len(ServerState.held) > 1
        and sum(array.nbytes for _, _, arrays in ServerState.held for array in arrays.values()) > _MAX_HELD_BYTES
    ):
        ServerState.held.popleft()


def changed_results(words: str) -> Iterator[str]:
    """Yield a text for each held result that is no longer as it was; it is not compared again."""
    for entry in list(ServerState.held):
        number, parts, copies = entry
        try:
            is_changed = any(bits_of(tensor) != copies[key].tobytes() for key, tensor in parts.items())
        except Exception:  # a later call has made it unusable
            is_changed = True
        if is_changed:
            ServerState.held.remove(entry)
            yield f"the result of call {number + 1} {words}"


@cache
def _load_mallopt() -> Callable[[int, int], int] | None:
    """Return the function of glibc that says what memory is filled with; None if there is another allocator."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return None
    return mallopt if sys.platform == "linux" else None


@contextmanager
def filled_memory(sizes: Iterable[int]) -> Iterator[None]:
    """Fill free memory meanwhile with ``FREE_BYTE``, so that an unwritten number is not right by chance.

    Blocks of these ``sizes`` in NumPy's cache of small blocks are filled, too.
    """
    import numpy as np

    mallopt = _load_mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_PERTURB, 0xFF ^ FREE_BYTE)
    try:
        for size in {size for size in sizes if 0 < size < _CACHED_BLOCK_BYTES}:
            blocks = [np.full(size, FREE_BYTE, np.uint8) for _ in range(_BLOCKS_TO_FILL)]
            blocks.clear()
        yield
    finally:
        mallopt(_M_PERTURB, 0)


@contextmanager
def observed_attention(is_asked: bool) -> Iterator[set[str]]:
    """Collect which attention of a library a call computes with, if that is asked.

    Python's functions are seen by the interpreter's profiling hook, and operations of torch by torch's profiler: it
    sees those that compiled programs call, too. Only the outermost function counts: calls inside it are not counted.
    """
    names: set[str] = set()
    if not is_asked:
        yield names
        return
    depths: dict[int, int] = {}

    def see_call(frame: FrameType, event: str, argument: object) -> None:
        name, module = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        if event not in ("call", "return") or name.startswith("_") or not _ATTENTION_NAME.search(name):
            return
        if module.partition(".")[0] in _PACKAGES_WITH_ATTENTION:
            thread = threading.get_ident()
            depth = depths.get(thread, 0)
            if event == "call" and depth == 0:
                names.add(f"{module}.{frame.f_code.co_qualname.replace('.<locals>', '')}")
            depths[thread] = max(0, depth + (1 if event == "call" else -1))

    torch = sys.modules.get("torch")
    activities = [torch.profiler.ProfilerActivity.CPU] if torch is not None else []
    with torch.profiler.profile(activities=activities) if torch is not None else nullcontext() as profiler:
        threading.setprofile(see_call)
        sys.setprofile(see_call)
        try:
            yield names
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if profiler is not None:
        names |= {event.key for event in profiler.key_averages() if _TORCH_OPERATION.search(event.key)}


if __name__ == "__main__":
    serve()
