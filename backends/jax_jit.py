"""Attention in JAX as its users run it, compiled: each function of the eager module as one XLA program.

The compiler may fuse steps, contract a product and a sum into one operation, and leave out the rounding of an
intermediate that nothing else reads. The stages come back sorted by name, as JAX sorts the keys of a dictionary.

``OUTPUT`` is attention that returns only its output, as models call it: the compiler may then fuse what it has to store
for the stages, and leave out what nothing reads. ``ABSORBED`` is latent attention with its projections absorbed.
Libraries that compute with JAX are called on ``LIBRARY``, or compiled on ``LIBRARY_JIT``.

Programs are kept between processes as they are: the next one neither traces nor compiles them. JAX's own cache keeps
what XLA makes of a program; to find it there the function is traced and lowered first, which takes most of the time.
What is kept here is found by the function, its options, and the shapes and types of its arrays, together with all that
the program follows from: the sources of JAX's modes here, every file of jax and jaxlib by size and time, JAX's
settings, and XLA's flags. So a framework that somebody builds anew under the same version is compiled anew. The
processor's kind and the versions are in the folder's name (``execution/environment.py``).
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from attncheck.backends import derived, jax_backend
from attncheck.backends.contract import Stages
from attncheck.backends.library_arrays import FrameworkArrays, JittedArrays, KerasArrays, TokamaxArrays

Result = TypeVar("Result")
Compiled = Callable[..., Any]

PROGRAM_FOLDER_VARIABLE = "ATTNCHECK_JAX_PROGRAMS"
"""The variable that names the folder; without it nothing is kept."""
MAX_BYTES = 2**29
"""Bytes that the folder may take. What was not used for the longest time goes first."""
seconds_compiled = 0.0
"""The seconds that this process has compiled so far."""
programs_compiled = 0
"""The number of programs that this process has compiled so far."""
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "PJRT_NPROC")


def compile_and_keep(function: Callable[..., Result], static: Collection[str]) -> Callable[..., Result]:
    """Return a function as a compiled program that is kept, if there is a folder.

    Args:
        function: What is compiled, anew for each set of shapes, types and static options.
        static: The names of the parameters that it is compiled for. They have to be given by name.
    """
    program: Any = jax.jit(function, static_argnames=sorted(static))
    if not os.environ.get(PROGRAM_FOLDER_VARIABLE):
        jitted: Callable[..., Result] = program
        return jitted
    name = _defining_lines(function)
    positions = tuple(inspect.signature(function).parameters)
    loaded: dict[str, Compiled] = {}

    @wraps(function)
    def call(*inputs: Any, **options: Any) -> Any:
        chosen = {key: value for key, value in options.items() if key in static}
        arrays = {key: value for key, value in options.items() if key not in static}
        leaves, tree = jax.tree.flatten((inputs, arrays))
        are_arrays = all(isinstance(leaf, jax.Array) for leaf in leaves)
        on_cpu = are_arrays and all(device.platform == "cpu" for leaf in leaves for device in leaf.devices())
        if not {*positions[: len(inputs)]}.isdisjoint(static) or not on_cpu:
            return program(*inputs, **options)
        kinds = [(leaf.shape, str(leaf.dtype), leaf.weak_type) for leaf in leaves]
        key = repr((name, sorted(chosen.items()), str(tree), kinds))
        if key not in loaded:
            path = _program_path(key)
            with suppress(Exception):  # a damaged file may fail in any way
                read = _read_program(path)
                returned = jax.block_until_ready(read(*inputs, **arrays))
                loaded[key] = read
                return returned
            loaded[key] = _compile_without_cache(program, inputs, options)
            _store_program(loaded[key], path)
        return loaded[key](*inputs, **arrays)

    return call


def _defining_lines(function: Callable[..., Any]) -> list[tuple[str, int]]:
    """Return the module and line of a function and of the functions that it wraps, because they share one name."""
    places = []
    while function is not None:
        places.append((function.__globals__["__name__"], function.__code__.co_firstlineno))
        function = getattr(function, "__wrapped__", None)  # type: ignore[assignment]
    return places


def _program_path(key: str) -> Path:
    return _program_folder() / hashlib.sha256(f"{_origin_digest()}\n{key}".encode()).hexdigest()


def _compile_without_cache(program: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    """Compile without JAX's cache, because a program from that cache cannot be stored: it lacks its functions."""
    global programs_compiled, seconds_compiled
    enabled, begun = jax.config.values["jax_enable_compilation_cache"], perf_counter()
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        made: Compiled = program.lower(*inputs, **options).compile()
        programs_compiled += 1
        return made
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        seconds_compiled += perf_counter() - begun


def _read_program(path: Path) -> Compiled:
    program: Compiled = deserialize_and_load(*pickle.loads(zlib.decompress(path.read_bytes())))
    with suppress(OSError):  # another user's file may be readable, but not writable
        os.utime(path)
    return program


def _store_program(program: Any, path: Path) -> None:
    """Store a program, if possible: the disk may be full, or the program not serializable."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(Exception):
        temporary.write_bytes(zlib.compress(pickle.dumps(serialize(program)), 1))
        temporary.replace(path)
    with suppress(OSError):
        temporary.unlink(missing_ok=True)


@lru_cache(maxsize=1)
def _program_folder() -> Path:
    """Create the folder, remove old programs if it is full, and return it."""
    folder = Path(os.environ[PROGRAM_FOLDER_VARIABLE])
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a user who can write there can run code in this process
        _remove_old_programs(folder)
    return folder


def _remove_old_programs(folder: Path) -> None:
    """Remove the least recently used programs of a folder that is too large until it is half as large as allowed."""
    entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder))
    taken = sum(size for _, size, _ in entries)
    if taken <= MAX_BYTES:
        return
    for _, size, path in entries:
        with suppress(OSError):
            Path(path).unlink()
        taken -= size
        if taken <= MAX_BYTES // 2:
            return


@lru_cache(maxsize=1)
def _origin_digest() -> str:
    """Return a digest of everything on which programs depend except their keys."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.read_bytes())
    for package in ("jax", "jaxlib"):
        folder = Path(str(import_module(package).__file__)).parent
        digest.update(repr(sorted(_file_states(folder))).encode())
    # Where JAX keeps its own cache changes no program.
    settings = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    digest.update(repr(sorted((name, repr(value)) for name, value in settings.items())).encode())
    digest.update(repr([os.environ.get(name) for name in _VARIABLES]).encode())
    return digest.hexdigest()


def source_files() -> list[Path]:
    """Return the files of this package that a program of JAX may follow from: its own modules, the contract,
    what is composed of others, and how libraries' functions are called.

    No other backend is among them: whoever works on one need not wait until JAX has compiled everything anew.
    """
    here = Path(__file__).parent
    others = ("codes", "composed", "contract", "derived", "families", "family_calls", "library_arrays")
    return [*sorted(here.glob("jax_*.py")), *(here / f"{name}.py" for name in others)]


def _file_states(folder: str | Path) -> Iterator[tuple[str, int, int]]:
    """Give every file of a package with its size and the time when it was changed, except for compiled Python."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _file_states(entry.path)
        else:
            yield entry.path, entry.stat().st_size, entry.stat().st_mtime_ns


# What a program is compiled for, rather than given: it decides on shapes, and on which operations there are. Numbers
# such as the scale are static, too. As arrays they would save none of the 498 programs of the standard cases, and 17 of
# the 2,419 programs of all cases: cases with the same shapes, dtypes and options differ in their inputs only.
_STATIC_ARGUMENTS = frozenset(
    {"empty_rows", "epsilon", "heads", "is_causal", "kv_heads", "lse_base", "norm", "norm_after_rotation"}
    | {"packing", "stored_as", "swizzle"}
    | {"mask_fill", "norm_over", "rotary_interleaved", "scale", "softcap", "window"}
)


def compile_function(function: Callable[..., Stages]) -> Callable[..., Stages]:
    """Return a function of the contract as one program, compiled anew for every set of shapes and options."""
    return compile_and_keep(function, _STATIC_ARGUMENTS & {*inspect.signature(function).parameters})


JIT = derived.compile_backend(jax_backend, compile_function)
OUTPUT = derived.compile_output_only(jax_backend, compile_function)
ABSORBED = derived.make_absorbed_backend(
    jax_backend.attention, jnp.concatenate, lambda a, b: a @ b.mT, jax_backend, compile_function
)
LIBRARY = FrameworkArrays(jax_backend)
LIBRARY_JIT = JittedArrays(jax_backend, compile_and_keep)
TOKAMAX = TokamaxArrays(jax_backend, compile_and_keep)
KERAS = KerasArrays(LIBRARY_JIT, "jax")
