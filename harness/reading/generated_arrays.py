"""Arrays that a few numbers describe: masks of today's models, ALiBi, relative position biases, and random numbers.

The sources of masks and biases stand in docs/cases.md, section 5. ALiBi follows the authors' code for heads that are no
power of two, and relative buckets ``_relative_position_bucket`` of the authors' code.

Random numbers are reproduced without the software that documents drew them with. A generator is a class that is made
from a seed and has one method per distribution that it knows; drawing advances it.
To add one, write its class, add its line to ``GENERATORS`` and its name to ``model.Random``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, localcontext
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attncheck.reading import array_kinds as kinds
from attncheck.reading.array_kinds import Alibi, PositionPattern, RelativeBuckets
from attncheck.reading.shapes import FieldFault, format_shape
from attncheck.reading.stored_arrays import MAX_STORED_NUMBERS
from attncheck.reading.yaml_reader import FieldPath
from attncheck.spec import Shape

if TYPE_CHECKING:
    from flint import arb


Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]
_GroupedKeys = kinds.Images | kinds.ImageSpans | kinds.Segments | kinds.DocumentLengths
_GROUP_NUMBER_OF_TEXT = 0
"""The number of a key that is text and belongs to no image."""


def mask_shape(source: kinds.AnyMaskPattern) -> Shape:
    """Return the shape of a mask without making it: (Lq, T), or (B, 1, Lq, T). Raises ``FieldFault``."""
    match source:
        case kinds.Tree():
            parents = _read_parents(source.tree)
            nodes = parents.shape[-1]
            return _mask_shape_with_batch(parents.shape[:-1], nodes, source.committed + nodes)
        case kinds.PrefixLM():
            return _mask_shape_with_batch(_read_whole_numbers(source.prefix_lm, "prefix_lm", 1).shape, *source.shape)
        case kinds.Images() | kinds.ImageSpans() | kinds.Segments() | kinds.DocumentLengths():
            return _mask_shape_with_batch(find_group_of_each_key(source).shape[:-1], *source.shape)
        case kinds.Chunked() if source.left_padding is not None:
            return _mask_shape_with_batch(
                _read_whole_numbers(source.left_padding, "left_padding", 1).shape, *source.shape
            )
        case kinds.Dilated() if source.window == [None, None]:
            raise FieldFault("window", "bounds nothing on either side; expected a number of steps on one at least")
    return _mask_shape_with_batch((), *source.shape)


def make_mask_or_bias(source: kinds.Array) -> NDArray[np.float64]:
    """Return the numbers of a mask or bias that follows from positions alone."""
    return make_alibi_bias(source) if isinstance(source, Alibi) else np.asarray(make_mask(source), np.float64)  # type: ignore[arg-type]


def expand_table_to_positions(source: kinds.Blocks | RelativeBuckets, table: NDArray[Any]) -> NDArray[Any]:
    """Return the table's entry for every query and key, by its block or by the bucket of its distance."""
    if isinstance(source, RelativeBuckets):  # (buckets, H) -> (H, Lq, T)
        distance, is_both_ways = _relative_positions(source), source.bidirectional
        buckets = find_relative_buckets(distance, len(table), source.max_distance, bidirectional=is_both_ways)
        return np.moveaxis(table[buckets], -1, 0)
    rows, columns = (np.arange(length) // size for length, size in zip(source.shape, source.block_size, strict=True))
    return table[..., rows[:, np.newaxis], columns]


def make_mask(source: kinds.AnyMaskPattern) -> Mask:
    """Return the mask that a description means, of the shape that ``mask_shape`` says.

    Example:
        >>> window = kinds.SlidingWindow(sliding_window=[1, 0], shape=[2, 3], offset=1)
        >>> make_mask(window).astype(int).tolist()
        [[1, 1, 0], [0, 1, 1]]
    """
    shape = mask_shape(source)
    if isinstance(source, kinds.Tree):
        return _make_tree_mask(_read_parents(source.tree), source.committed).reshape(shape)
    queries, keys = source.shape
    query = source.offset + np.arange(queries)[:, np.newaxis]
    return np.broadcast_to(_make_visibility_mask(source, query, np.arange(keys)), shape).copy()


def block_mask_shape(table: Shape, block_size: Sequence[int], shape: Sequence[int]) -> Shape:
    """Return the shape of a mask of blocks. Raises ``FieldFault`` for a table with too few or too many blocks."""
    wanted = tuple(-(-length // size) for length, size in zip(shape, block_size, strict=True))
    if len(table) < 2 or table[-2:] != wanted:
        raise FieldFault(
            "blocks",
            f"expected a table of {wanted[0]}x{wanted[1]} blocks of {block_size[0]}x{block_size[1]} for {shape[0]} "
            f"queries and {shape[1]} keys, got shape {format_shape(table)}",
        )
    return (*table[:-2], *shape)


def _make_visibility_mask(source: Any, query: Positions, key: Positions) -> Mask:
    """Return who sees whom, for positions of queries, (Lq, 1), and of keys, (T)."""
    match source:
        case kinds.SlidingWindow():
            seen = _make_window_mask(source.sliding_window, key - query)
        case kinds.PrefixLM():
            seen = (key <= query) | (key < _broadcast_over_mask(_read_whole_numbers(source.prefix_lm, "prefix_lm", 1)))
        case kinds.Images() | kinds.ImageSpans():
            of_query, of_key = _split_groups_by_queries_and_keys(find_group_of_each_key(source), query)
            seen = (key <= query) | ((of_query == of_key) & (of_key != _GROUP_NUMBER_OF_TEXT))
        case kinds.Segments() | kinds.DocumentLengths():
            of_query, of_key = _split_groups_by_queries_and_keys(find_group_of_each_key(source), query)
            seen = of_query == of_key
        case kinds.Chunked():
            begin = _broadcast_over_mask(_read_whole_numbers(source.left_padding or 0, "left_padding", 1))
            seen = (key <= query) & ((query - begin) // source.chunked == (key - begin) // source.chunked)
        case kinds.FirstTokens():
            seen = (key <= query) & ((key < source.first_tokens) | (key >= query - source.left))
        case kinds.Dilated():
            steps, gap = np.divmod(key - query, source.dilated)
            seen = _make_window_mask(source.window, steps) & (gap == 0)
        case _:
            raise AssertionError(f"a mask of unknown kind: {source!r}")
    return np.asarray(seen)


def _make_window_mask(window: Sequence[int | None], distance: Positions) -> Mask:
    left, right = window
    within = np.ones(distance.shape, bool)
    if left is not None:
        within &= distance >= -left
    if right is not None:
        within &= distance <= right
    return within


def _make_tree_mask(parents: Positions, committed: int) -> Mask:
    """Return who sees whom among a prefix and the nodes behind it, (B, 1, N, committed + N)."""
    batch, nodes = parents.reshape(-1, parents.shape[-1]), parents.shape[-1]
    seen = np.zeros((len(batch), nodes, nodes), bool)
    for node in range(nodes):  # a parent comes before its children, so that its own row is complete
        has_parent = batch[:, node] >= 0
        seen[has_parent, node] = seen[has_parent, batch[has_parent, node]]
        seen[:, node, node] = True
    prefix = np.ones((len(batch), nodes, committed), bool)
    return np.concatenate([prefix, seen], axis=-1)[:, np.newaxis]


def _mask_shape_with_batch(batch: Shape, queries: int, keys: int) -> Shape:
    return (*batch, 1, queries, keys) if batch else (queries, keys)


def _broadcast_over_mask(numbers: Positions) -> Positions:
    return numbers.reshape(*numbers.shape, 1, 1, 1) if numbers.ndim else numbers


def _split_groups_by_queries_and_keys(numbers: Positions, query: Positions) -> tuple[Positions, Positions]:
    """Return the numbers of queries, (..., Lq, 1), and of keys, (..., 1, T), by their positions."""
    of_query = numbers[..., query[:, 0]][..., np.newaxis]
    of_key = numbers[..., np.newaxis, :]
    return (of_query[:, np.newaxis], of_key[:, np.newaxis]) if numbers.ndim == 2 else (of_query, of_key)


def find_group_of_each_key(source: _GroupedKeys) -> Positions:
    """Return the number of each key's image or segment, (T), or (B, T). Raises ``FieldFault``."""
    field = kinds.kind_of(source)
    description = getattr(source, field)
    if isinstance(source, kinds.Images | kinds.Segments):
        numbers = _read_whole_numbers(description, field, 2)
    else:
        axes, read = (2, _image_of_each_key) if isinstance(source, kinds.ImageSpans) else (1, _document_of_each_key)
        numbers = _read_groups_per_batch_entry(description, field, axes, source, read)
    queries, keys = source.shape
    if numbers.ndim == 0 or numbers.shape[-1] != keys:
        raise FieldFault(field, f"expected a number for each of {keys} keys, got {_describe_shape(numbers)}")
    if source.offset + queries > keys:
        raise FieldFault(
            "offset",
            f"the last query would stand at position {source.offset + queries - 1}, and there are {keys} keys, "
            f"of which `{field}` tells the numbers",
        )
    return numbers


def _read_groups_per_batch_entry(
    description: Any,
    field: str,
    axes: int,
    source: kinds.PositionPattern,
    read: Callable[[Positions, FieldPath, int], Positions],
) -> Positions:
    """Read a description of so many axes once, or one for each element of the batch."""
    depth, inner = 0, description
    while isinstance(inner, list) and inner:
        depth, inner = depth + 1, inner[0]
    keys = source.shape[1]
    if keys > MAX_STORED_NUMBERS:
        raise FieldFault("shape", f"{keys} keys are too many; expected at most {MAX_STORED_NUMBERS} elements")
    if depth <= axes:
        return read(_read_whole_numbers(description, (field,), axes), (field,), keys)
    rows = [
        (_read_whole_numbers(row, (field, number), axes), (field, number)) for number, row in enumerate(description)
    ]
    return np.array([read(row, path, keys) for row, path in rows])


def _image_of_each_key(spans: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of images from 1 on; 0 is text."""
    numbers = np.full(keys, _GROUP_NUMBER_OF_TEXT, np.int64)
    if spans.ndim != 2 or spans.shape[-1] != 2:
        raise FieldFault(path, f"expected a list of [begin, end], got {_describe_shape(spans)}")
    for number, (begin, end) in enumerate(spans.tolist()):
        if not begin < end <= keys:
            raise FieldFault((*path, number), f"expected begin < end <= {keys}, got [{begin}, {end}]")
        if numbers[begin:end].any():
            raise FieldFault((*path, number), f"[{begin}, {end}] overlaps with an image before it")
        numbers[begin:end] = number + 1
    return numbers


def _document_of_each_key(lengths: Positions, path: FieldPath, keys: int) -> Positions:
    """Number the keys of documents, the first with 0."""
    if lengths.ndim != 1 or lengths.sum() != keys:
        raise FieldFault(path, f"expected lengths of {keys} keys together, got {lengths.sum()}")
    return np.repeat(np.arange(len(lengths)), lengths)


def _describe_shape(numbers: Positions) -> str:
    return "a single number" if numbers.ndim == 0 else f"{'x'.join(map(str, numbers.shape))} numbers"


def _read_parents(tree: Any) -> Positions:
    """Read the parents of a tree's nodes, -1 for a child of the prefix. Raises ``FieldFault``."""
    parents = _read_whole_numbers(tree, "tree", 2, none=-1)
    if parents.ndim == 0:
        raise FieldFault("tree", "expected a list with the parent of each node")
    for place in map(tuple, np.argwhere(parents >= np.arange(parents.shape[-1]))):
        at = tuple(int(index) for index in place)
        raise FieldFault(
            ("tree", *at), f"expected null or the number of a node before node {at[-1]}, got {parents[place]}"
        )
    return parents


def _read_whole_numbers(values: Any, field: str | FieldPath, most_axes: int, none: int | None = None) -> Positions:
    """Read nested lists of whole numbers of at least 0. Raises ``FieldFault`` at what is none."""
    shape = _check_nested_numbers(values, (field,) if isinstance(field, str) else field, most_axes, none)
    flat = values
    for _ in shape[1:]:
        flat = [number for row in flat for number in row]
    numbers = [none if number is None else number for number in (flat if shape else [flat])]
    return np.array(numbers, np.int64).reshape(shape)


def _check_nested_numbers(value: Any, path: FieldPath, most_axes: int, none: int | None) -> Shape:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= kinds.MAX_POSITION:
        return ()
    if value is None and none is not None:
        return ()
    if not isinstance(value, list) or most_axes == 0 or not value:
        wanted = f"a whole number from 0 to {kinds.MAX_POSITION}{'' if none is None else ' or null'}"
        lists = f", or {'lists' if most_axes > 1 else 'a list'} of them" if most_axes else ""
        raise FieldFault(path, f"expected {wanted}{lists}, got {'nothing' if value is None else repr(value)[:80]}")
    shapes = [_check_nested_numbers(row, (*path, number), most_axes - 1, none) for number, row in enumerate(value)]
    for number, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise FieldFault((*path, number), "ragged: expected as many numbers as in the first row")
    return (len(value), *shapes[0])


Numbers = NDArray[np.float64]
# A choice: exact boundaries take powers as large as max_distance^256; more buckets make them slower.
MAX_BUCKETS = 512
# float64 has 17 digits; a number would have to be within 1e-60 of a midpoint for its rounding to be wrong.
_SLOPE_DIGITS = 60


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head, each the float64 next to it.

    For n heads, a power of two, head h has 2^(-8 (h + 1) / n). For another number, the largest power of two n below it
    has its slopes first, and the rest has every other slope of 2n heads.

    Example:
        >>> alibi_slopes(2), alibi_slopes(3)
        ([0.0625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [_power_of_two(-8 * (head + 1), below) for head in range(below)]
    return slopes + [_power_of_two(-8 * (2 * head + 1), 2 * below) for head in range(heads - below)]


def _power_of_two(exponent: int, divisor: int) -> float:
    """Return 2^(exponent / divisor), rounded once, the same on every machine."""
    with localcontext() as context:
        context.prec = _SLOPE_DIGITS
        return float(Decimal(2) ** (Decimal(exponent) / divisor))


def alibi_shape(source: Alibi) -> Shape:
    """Return the shape of an ALiBi bias, (H, Lq, T)."""
    return (source.alibi, *source.shape)


def make_alibi_bias(source: Alibi) -> Numbers:
    """Return minus slope times distance for each head, query and key."""
    slopes = np.array(alibi_slopes(source.alibi))[:, np.newaxis, np.newaxis]
    return np.asarray(-(slopes * np.abs(_relative_positions(source))) + 0.0)  # no negative zero


def alibi_magnitude_bound(source: Alibi) -> float:
    """Return a bound on the numbers of an ALiBi bias, in magnitude."""
    below = 1 << (source.alibi.bit_length() - 1)
    largest = _power_of_two(-8, below if source.alibi == below else 2 * below)
    return largest * (source.offset + sum(source.shape))


def bucket_bias_shape(source: RelativeBuckets, table: Shape) -> Shape:
    """Return the shape of a bias of relative buckets, (H, Lq, T). Raises ``FieldFault``."""
    if len(table) != 2:
        raise FieldFault("relative_buckets", f"expected a table (buckets, H), got shape {format_shape(table)}")
    buckets, least = table[0], 4 if source.bidirectional else 2
    if not least <= buckets <= MAX_BUCKETS or (source.bidirectional and buckets % 2):
        even = "an even number of " if source.bidirectional else ""
        raise FieldFault(
            "relative_buckets", f"expected {even}{least} to {MAX_BUCKETS} rows, one for each bucket, got {buckets}"
        )
    exact = _count_exact_buckets(buckets, source.bidirectional)
    if source.max_distance <= exact:
        raise FieldFault(
            "max_distance", f"expected more than {exact}, as distances below that have a bucket of their own"
        )
    return (table[1], *source.shape)


def find_relative_buckets(
    distance: NDArray[np.int64], buckets: int, max_distance: int, *, bidirectional: bool
) -> NDArray[np.int64]:
    """Return the bucket of each distance j - p, exactly.

    Half of the buckets hold one distance each. The other half is as wide as a geometric sequence up to
    ``max_distance``: of e exact buckets and m others, distance n is in bucket e + floor(m log(n / e) / log(M / e)), at
    most the last. Integers determine the steps of that floor, so that no logarithm is rounded.

    Example:
        >>> find_relative_buckets(np.array([-3, 0, 1, 3, 6]), 8, 16, bidirectional=True).tolist()
        [2, 0, 5, 6, 7]
    """
    first: NDArray[np.int64] = np.zeros(distance.shape, np.int64)
    back = np.maximum(-distance, 0)
    exact = _count_exact_buckets(buckets, bidirectional)
    if bidirectional:
        buckets //= 2
        first, back = np.where(distance > 0, buckets, 0), np.abs(distance)
    steps = np.array(_first_distances(exact, buckets - exact, max_distance), np.int64)
    wide = exact + np.searchsorted(steps, back, side="right")
    return np.asarray(first + np.where(back < exact, back, wide))


@lru_cache
def _first_distances(exact: int, others: int, max_distance: int) -> list[int]:
    """Return the least distance of each bucket behind the first one that holds several distances."""
    return [_first_distance(exact, others, max_distance, step) for step in range(1, others)]


def _first_distance(exact: int, others: int, max_distance: int, step: int) -> int:
    """Return the least n with others * log(n / exact) >= step * log(max_distance / exact)."""
    wanted = max_distance**step * exact ** (others - step)  # n^others >= this
    low, high = exact, max_distance
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**others >= wanted else (middle + 1, high)
    return low


def _count_exact_buckets(buckets: int, bidirectional: bool) -> int:
    return (buckets // 2 if bidirectional else buckets) // 2


def _relative_positions(source: PositionPattern) -> NDArray[np.int64]:
    """Return how far each key stands behind each query, j - p: (Lq, T)."""
    queries, keys = source.shape
    return np.asarray(np.arange(keys) - (source.offset + np.arange(queries))[:, np.newaxis])


def make_twister_word_source(state: NDArray[np.uint32]) -> Callable[[int], NDArray[np.uint64]]:
    """Return a function that gives the next n 32-bit words after the 624 words of ``state``."""
    twister = np.random.MT19937()
    twister.state = {"bit_generator": "MT19937", "state": {"key": state, "pos": 624}}
    return twister.random_raw


_free_generators: list[np.random.RandomState] = []
"""Generators that nobody draws from any more."""


class NumpyLegacyGenerator:
    """NumPy's legacy generator after ``numpy.random.seed(seed)``; float64 and int64, row order."""

    def __init__(self, seed: int) -> None:
        # A new one draws entropy first, which takes sixty times as long as to seed one that is there.
        self._state = _free_generators.pop() if _free_generators else np.random.RandomState(0)
        self._state.seed(seed)

    def __del__(self) -> None:
        _free_generators.append(self._state)

    def rand(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Uniform on [0, 1)."""
        return self._state.random_sample(shape)

    def randn(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Standard normal, by the polar method."""
        return self._state.standard_normal(shape)

    def randint(self, shape: tuple[int, ...], low: int, high: int) -> NDArray[Any]:
        """Integers of [low, high)."""
        # The default dtype is the platform's long; the document's was 64 bits wide.
        return self._state.randint(low, high, size=shape, dtype=np.int64)

    def runif(self, shape: tuple[int, ...], low: float, high: float) -> NDArray[Any]:
        """Uniform on [low, high)."""
        return self._state.uniform(low, high, shape)


_WORD_TO_UNIT = 2.3283064365386963e-10
"""2^-32, from a word of 32 bits to [0, 1)."""
_HALF_STEP = 0.5 * 2.328306437080797e-10
"""Half of 1/(2^32 - 1), to 16 digits."""
# As in RNG_Init of R: the seed passes the congruential generator 50 times before the state is filled.
_INITIAL_SCRAMBLING = 50
_STATE_WORDS = 624
"""Words of 32 bits in the state of the Mersenne Twister MT19937."""


class RGenerator:
    """R's generator after ``set.seed(seed)``; float64, column order."""

    def __init__(self, seed: int) -> None:
        words = []
        for step in range(_INITIAL_SCRAMBLING + 1 + _STATE_WORDS):
            seed = (69069 * seed + 1) % 2**32
            if step > _INITIAL_SCRAMBLING:
                words.append(seed)
        self._words = make_twister_word_source(np.array(words, dtype=np.uint32))

    def runif(self, shape: tuple[int, ...], low: float, high: float) -> NDArray[np.float64]:
        """Uniform on (low, high); ``matrix(runif(n, low, high), nrow, ncol)`` fills by columns."""
        unit = np.clip(self._words(int(np.prod(shape))) * _WORD_TO_UNIT, _HALF_STEP, 1 - _HALF_STEP)
        numbers: NDArray[np.float64] = low + (high - low) * unit
        return numbers.reshape(shape, order="F")


# As in torch on a CPU: eight radii and eight angles make 16 normal numbers.
_BOX_MULLER_BLOCK = 16
_TWO_PI = np.float32(2 * np.pi)


class TorchCpuGenerator:
    """torch's CPU generator after ``torch.manual_seed(seed)``; float32, row order."""

    SMALLEST_RANDN = _BOX_MULLER_BLOCK

    def __init__(self, seed: int) -> None:
        # RandomState(seed) has the reference initialisation of the twister, which torch uses too.
        state = np.random.RandomState(seed).get_state(legacy=False)["state"]["key"]
        self._words = make_twister_word_source(state)

    def rand(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Uniform on [0, 1), bit for bit."""
        return self._uniform(int(np.prod(shape))).reshape(shape)

    def randn(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Standard normal, at least 16 numbers; torch's own builds come within 2^-20 of it."""
        size = int(np.prod(shape))
        uniform = self._uniform(size)
        normal = np.empty(size, dtype=np.float32)
        full = size - size % _BOX_MULLER_BLOCK
        normal[:full] = _box_muller(uniform[:full])
        if size > full:
            normal[-_BOX_MULLER_BLOCK:] = _box_muller(self._uniform(_BOX_MULLER_BLOCK))
        return normal.reshape(shape)

    def _uniform(self, size: int) -> NDArray[np.float32]:
        return (self._words(size) & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


def _box_muller(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    radii, angles = np.split(uniform.reshape(-1, _BOX_MULLER_BLOCK), 2, axis=1)
    from flint import arb  # few cases draw normal numbers

    logarithm = _evaluate_correctly_rounded(1 - radii, np.log, arb.log)
    radius = np.sqrt(-2 * logarithm)  # IEEE 754 rounds a square root correctly
    theta = _TWO_PI * angles
    cosine = _evaluate_correctly_rounded(theta, np.cos, arb.cos)
    sine = _evaluate_correctly_rounded(theta, np.sin, arb.sin)
    return np.concatenate([radius * cosine, radius * sine], axis=1).ravel()


def _evaluate_correctly_rounded(
    argument: NDArray[np.float32],
    function: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    exact_function: Callable[[arb], arb],
) -> NDArray[np.float32]:
    """Evaluate a function of float32 numbers, correctly rounded to float32.

    float64 is good to a few of its own units, which decides the rounding except very close to the middle between two
    float32 numbers; there, interval arithmetic decides.
    """
    from flint import arb, ctx

    close = function(argument.astype(np.float64))
    rounded = close.astype(np.float32)
    slack = 8 * np.spacing(np.abs(close))
    undecided = (close - slack).astype(np.float32) != (close + slack).astype(np.float32)
    for index in zip(*np.nonzero(undecided), strict=True):
        # 128 bits are far more than the distance of such a value from the middle ever needs here.
        with ctx.workprec(128):
            exact = exact_function(arb(float(argument[index])))
            low, high = (_round_bound_to_float32(exact, side) for side in (-1, 1))
        assert low == high, "the value lies exactly in the middle, which log, cos and sin of float32 numbers never do"
        rounded[index] = low
    return rounded


def _round_bound_to_float32(exact: arb, side: int) -> np.float32:
    """Round an enclosure's lower (-1) or upper (1) end to float32."""
    from flint import arb

    end = exact.lower() if side < 0 else exact.upper()
    near = np.float32(float(end))
    # float() rounded to float64 first; step to the float32 that is closest to the end itself.
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(candidates, key=lambda candidate: abs(end - arb(float(candidate))).mid())


Generator = NumpyLegacyGenerator | RGenerator | TorchCpuGenerator

GENERATORS: Mapping[str, type[Generator]] = {
    "numpy-legacy": NumpyLegacyGenerator,
    "r": RGenerator,
    "torch": TorchCpuGenerator,
}


def check_draw(generator: str, distribution: str, parameters: Mapping[str, object], shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless the generator can make this draw; draws nothing."""
    known = draw_parameters_by_distribution(generator)
    if distribution not in known:
        raise ValueError(f"the generator {generator} has no {distribution}; expected one of {', '.join(known)}")
    wanted = known[distribution]
    for name in sorted(wanted - set(parameters)):
        raise ValueError(f"{distribution} of {generator} needs {name}")
    for name in sorted(set(parameters) - wanted):
        raise ValueError(f"{distribution} of {generator} takes no {name}")
    low, high = parameters.get("low"), parameters.get("high")
    if isinstance(low, int | float) and isinstance(high, int | float) and not low < high:
        raise ValueError(f"expected low < high, got {low} and {high}")
    if generator == "torch" and distribution == "randn" and 0 < np.prod(shape) < TorchCpuGenerator.SMALLEST_RANDN:
        raise ValueError(
            f"torch draws fewer than {TorchCpuGenerator.SMALLEST_RANDN} normal numbers by another method; "
            "expected a shape of at least as many"
        )


@cache
def draw_parameters_by_distribution(generator: str) -> Mapping[str, frozenset[str]]:
    """Return the draws of a generator, each with the parameters that it needs besides its shape."""
    methods = sorted(inspect.getmembers(GENERATORS[generator], inspect.isfunction))
    public = {name: inspect.signature(method).parameters for name, method in methods if not name.startswith("_")}
    return {name: frozenset(parameters) - {"self", "shape"} for name, parameters in public.items()}
