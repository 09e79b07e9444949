"""Case files made from their grammar: every kind of array, option and expectation, mostly sensible, often not quite."""

from __future__ import annotations

import random
from typing import Any, get_args

import fuzz_mutations

from attncheck.backends.contract import AXES, Window
from attncheck.reading.array_kinds import ARRAY_KINDS, COMBINED_KINDS, MASK_KINDS, WRAPPING_KINDS
from attncheck.spec import (
    CONVENTIONS,
    DTYPES,
    HEADS,
    OPERATIONS,
    OPTIONS,
    SCORE_SPECS,
    OptionSpec,
    computed_stages,
    input_specs,
)

Random = random.Random

_LENGTHS = (1, 1, 2, 2, 2, 2, 3, 3, 4, 0, 16, 17)
_LETTERS = tuple(letter for letter in AXES if letter != "T")
_HUGE_LENGTHS = (2**13, 2**16, 2**26, 2**27, 2**31, 2**63, 10**30)
_DRAWS = {"numpy-legacy": ("randn", "randn", "rand", "runif", "randint"), "r": ("runif",), "torch": ("rand", "randn")}
_NUMBERS = (
    0,
    1,
    -1,
    2,
    0.5,
    -0.25,
    1e-3,
    3,
    1e30,
    -1e39,
    1e300,
    10**30,
    5e-324,
    float("inf"),
    float("-inf"),
    float("nan"),
)


_OTHERS: tuple[Any, ...] = (
    None,
    1,
    2,
    0,
    1.5,
    True,
    "a",
    "dot",
    [1],
    [0, 1],
    {"constant": 1, "shape": [2]},
    {"each": "a"},
)


def case_file(draw: Random) -> bytes:
    """Return a case file of one to three cases."""
    operation = draw.choice(tuple(OPERATIONS))
    sizes = {letter: draw.choice(_LENGTHS) for letter in _LETTERS}
    if draw.random() < 0.8:
        sizes |= {letter: sizes[letter] or 1 for letter in _LETTERS if letter not in ("B", "Lq", "Lk", "P")}
        sizes["Hkv"] = sizes["H"]
    sizes["T"] = sizes["Lk"]
    if draw.random() < 0.05:
        sizes[draw.choice(tuple(sizes))] = draw.choice(_HUGE_LENGTHS)
    generator = draw.choice(tuple(_DRAWS))
    file: dict[str, Any] = {
        "title": "Made by the grammar",
        "source": {"kind": draw.choice(("document", "paper", "derivation")), "title": "Drawn"},
        "operation": operation,
        "defaults": {"random": {"generator": generator, "seed": draw.choice((0, 7, 2**32 - 1))}},
        "arrays": {
            name: _array(draw, _shape(draw, sizes, ("Lk", "D")), 2, generator)
            for name in ("a", "b")[: draw.randrange(3)]
        },
        "cases": [_case(draw, operation, sizes, number, generator) for number in range(draw.choice((1, 1, 1, 2, 3)))],
    }
    if draw.random() < 0.25:
        _repeat(file, draw)
    if draw.random() < 0.15:
        file = fuzz_mutations.change_data(file, draw)
    return fuzz_mutations.emit(file, draw).encode("utf-8", "surrogatepass")


def _repeat(file: dict[str, Any], draw: Random) -> None:
    """Put names in the places of some values, and give each name that value and others, in the file or in a case."""
    case = draw.choice(file["cases"])
    fields = [slot for slot in fuzz_mutations.slots(case) if slot != (case, "name")]
    names = draw.sample(("width", "heads", "a", "b", "each", "x_1"), draw.choice((1, 1, 2, 3)))
    values: dict[str, list[Any]] = {}
    for name, (container, key) in zip(names, draw.sample(fields, min(len(names), len(fields))), strict=False):
        others = draw.sample(_OTHERS, draw.choice((0, 0, 1, 1, 2)))
        values[name] = [container[key], *(other for other in others if other != container[key])]
        container[key] = {"each": name if draw.random() < 0.97 else draw.choice(("none", "", 1, ["a"]))}
    labelled = {name: {f"value {place}": each for place, each in enumerate(given)} for name, given in values.items()}
    rows = [
        {"name": f"row {place}"} | {name: given[place % len(given)] for name, given in values.items()}
        for place in range(draw.choice((1, 2, 3)))
    ]
    owner = draw.choice((file, case))
    owner["for_each"] = draw.choice((labelled, labelled, labelled, rows, values))


def _case(draw: Random, operation: str, sizes: dict[str, int], number: int, generator: str) -> dict[str, Any]:
    score = draw.choice(tuple(SCORE_SPECS)) if operation == "scoring" else None
    specs = input_specs(operation, score)
    inputs: dict[str, Any] = {}
    for name, spec in specs.items():
        if spec.required or draw.random() < 0.15 or (spec.required_input in inputs and draw.random() < 0.9):
            shape = _shape(draw, sizes, spec.axes)
            inputs[name] = _mask(draw, shape, generator) if spec.is_boolean else _array(draw, shape, 2, generator)
            if spec.is_count and name.startswith("cu_seqlens"):
                count = min(9, shape[0])  # a length of 2^31 is what a case file may say, and no list to be written out
                inputs[name] = {"values": sorted(draw.choice((0, 0, sizes[spec.max_value_axis])) for _ in range(count))}
            elif spec.is_count:
                inputs[name] = {
                    "values": [draw.choice((0, 1) * 9 + (2, 2.0, -1, 10**20, True)) for _ in range(min(9, sizes["B"]))]
                }
    options = _options(draw, operation, sizes)
    if score and draw.random() < 0.9:
        options["score"] = score
    case: dict[str, Any] = {"name": f"Case {number}", "inputs": inputs, "options": options}
    for field, values in (
        ("id", ("an-id", "an-id", "Not an id", "", 3)),
        ("dtypes", [draw.sample(DTYPES, draw.randrange(1, 4))]),
        ("storage", ("float16", "bfloat16", "float64")),
        ("layout", ("split", "split", "merged")),
        (
            "memory_layout",
            [{draw.choice(tuple(inputs) or ("x",)): draw.choice(("strided", "transposed", "broadcast"))}],
        ),
        ("stages", [["output"], ["weights"], ["scores", "weights"]]),
        (
            "expect",
            [
                [
                    {
                        "stage": draw.choice(("scores", "weights", "output")),
                        "printed": draw.choice(("1", "0.5 0.5", "1e-400", ".")),
                    }
                ]
            ],
        ),
        ("allow_nonfinite", (True,)),
        ("supports_statistics", (True, False)),
        ("tags", (["causal"], ["causal", "window"])),
        ("notes", (["=1+1"], ["\u202e<b>"])),
    ):
        if draw.random() < 0.05:
            case[field] = draw.choice(tuple(values))
    return case


def _options(draw: Random, operation: str, sizes: dict[str, int]) -> dict[str, Any]:
    own = OPERATIONS[operation]
    possible = {name: _option(draw, spec, sizes) for name, spec in OPTIONS.items() if name != "score"}
    needed = {"heads"} if own.has_projections else set()
    if not computed_stages(operation, {}, [name for name, spec in own.inputs.items() if spec.required]):
        needed |= {"is_causal"}
    chance = {name: 0.15 if name in own.options else 0.004 for name in possible}
    seldom = {*HEADS, *CONVENTIONS, *(name for name, spec in OPTIONS.items() if spec.only_in_files)}
    chance |= dict.fromkeys(seldom & own.options & possible.keys(), 0.04)
    return {name: value for name, value in possible.items() if name in needed or draw.random() < chance[name]}


def _option(draw: Random, spec: OptionSpec, sizes: dict[str, int]) -> Any:
    """Return a value of an option's type."""
    if spec.type is bool:
        return draw.random() < 0.8
    if spec.type is int:
        return sizes["Hkv" if spec.name.startswith("kv") else "H"]
    if spec.type is float:
        return (
            draw.choice((1, 0.5, 30) * 3 + (1e308, 10**300, 0, float("inf")))
            if spec.must_be_positive
            else draw.choice(_NUMBERS)
        )
    if spec.type == Window:
        return [draw.choice((None, 0, 1, 2) * 3 + (2**31, 10**30)), draw.choice((0, 1, 3, 2**31, None))]
    return draw.choice(get_args(spec.type))


def _shape(draw: Random, sizes: dict[str, int], axes: tuple[str, ...]) -> list[int]:
    """Return a shape in which every letter has its size; a few are not quite so."""
    shape = []
    for axis in axes:
        length = 1
        for letter in axis.split("*"):
            length *= sizes.get("Lk" if letter == "T" else letter, 2)
        shape.append(1 if draw.random() < 0.004 else length)
    while len(shape) > 1 and shape[0] == 1 and draw.random() < 0.5:
        shape = shape[1:]
    return [*shape, 2] if draw.random() < 0.004 else shape


def _mask(draw: Random, shape: list[int], generator: str) -> dict[str, Any]:
    if generator == "numpy-legacy" and draw.random() < 0.5:
        return {"draw": "randint", "low": 0, "high": 2, "shape": shape}
    if draw.random() < 0.5:
        return _pattern(draw, draw.choice(MASK_KINDS), shape)
    return {"constant": draw.choice((1, 0) * 9 + (0.0, 2, True)), "shape": shape}


def _pattern(draw: Random, kind: str, shape: list[int]) -> dict[str, Any]:
    """Return a mask or bias that follows from positions, or is made of masks."""
    queries, keys = ([1, 1, *shape])[-2:]
    lists = draw.choice(([0, 1] * 40, [[0, 0, 1] * 30, [1, 1, 0] * 30], 1, [0], [[0], []], None))
    if isinstance(lists, list) and keys <= 40 and draw.random() < 0.8:
        lists = [each[:keys] if isinstance(each, list) else each for each in lists[:keys]]
    side = draw.choice((None, 0, 1, 2, 2**31, -1))
    values: dict[str, Any] = {
        **dict.fromkeys(("prefix_lm", "images", "segments"), lists),
        "image_spans": draw.choice(([[0, 1]], [[0, 2], [1, 3]], [[[0, 1]], [[0, 1]]], [0, 1], 3)),
        "document_lengths": draw.choice(([keys], [0, keys], [[keys], [1, keys - 1]], [1], 3)),
        "sliding_window": [side, draw.choice((0, 1, None))],
        "chunked": draw.choice((1, 2, 2**31, 0)),
        "first_tokens": draw.choice((0, 1, 2**31)),
        "dilated": draw.choice((1, 2, 3)),
        "tree": draw.choice(([None, 0, 0, 1], [[None, 0], [None, None]], [0], [None], 3)),
        "alibi": draw.choice((1, 2, 3, 4096, 0)),
        "blocks": {"constant": 1, "shape": [-(-queries // 2), -(-keys // 2)]},
        **{each: [{"constant": draw.choice((0, 1, 1, 2)), "shape": shape}] for each in ("any_of", "all_of")},
        "as_bias": {"constant": draw.choice((0, 1)), "shape": shape},
        "relative_buckets": {"constant": 1, "shape": [draw.choice((4, 8, 7)), draw.choice((1, 2))]},
    }
    beside: dict[str, Any] = {
        "chunked": {"left_padding": draw.choice((None, 0, [1, 2]))},
        "first_tokens": {"left": draw.choice((0, 1, 2**31))},
        "dilated": {"window": [side, draw.choice((0, 1, None))]},
        "tree": {"committed": draw.choice((0, 1, max(0, keys - 4), 2**31))},
        "blocks": {"block_size": [2, 2]},
        "relative_buckets": {"max_distance": draw.choice((5, 16, 2**31)), "bidirectional": draw.random() < 0.5},
    }
    positions: dict[str, Any] = (
        {"shape": [queries, keys]} if kind not in ("tree", "any_of", "all_of", "as_bias") else {}
    )
    if positions and kind != "blocks" and draw.random() < 0.4:
        positions["offset"] = draw.choice((0, 1, max(0, keys - queries), 2**31))
    return {kind: values[kind], **beside.get(kind, {}), **positions}


def _array(draw: Random, shape: list[int], depth: int, generator: str) -> Any:
    kind = draw.choice(ARRAY_KINDS) if draw.random() < 0.7 else "draw"
    size = 1
    for length in shape:
        size *= length
    if (depth == 0 and kind in COMBINED_KINDS) or (not 0 < size <= 200 and kind in ("values", "printed")):
        kind = "constant"
    number = draw.choice(_NUMBERS) if draw.random() < 0.1 else draw.choice((1, 2, -0.5))
    array = _plain_array(draw, kind, shape, number, generator)
    if kind in (*MASK_KINDS, *WRAPPING_KINDS, "alibi"):
        array = _pattern(draw, kind, shape)
    elif kind == "concat":
        array = {"concat": [_array(draw, shape, depth - 1, generator)], "axis": draw.randrange(-2, 2)}
    elif kind in COMBINED_KINDS:
        array = {kind: [_array(draw, shape, depth - 1, generator) for _ in range(draw.choice((1, 2, 3)))]}
    for field, value in (("times", number), ("plus", number), ("transpose", True), ("rows", [0, 1]), ("floor", True)):
        if draw.random() < 0.012:
            array[field] = value
    return array


def _plain_array(draw: Random, kind: str, shape: list[int], number: Any, generator: str) -> dict[str, Any]:
    """Return an array that is made of no others; a constant where the kind is another."""
    array: dict[str, Any] = {"constant": number, "shape": shape}
    match kind:
        case "values":
            array = {"values": _nested(shape, lambda: draw.choice((1, -2, 0.5, number)))}
        case "printed":
            array = {"printed": _nested(shape, lambda: draw.choice(("0.50", "1e3", "-1.25", "007", "1e-300")))}
        case "draw":
            array = {"draw": draw.choice(_DRAWS[generator]), "shape": shape}
            if array["draw"] in ("runif", "randint") or draw.random() < 0.02:
                array |= {"low": draw.choice((0, -1, -1.5, -(10**18))), "high": draw.choice((1, 2, 2.5, 10**18, 1e308))}
        case "file":
            array = {"file": draw.choice(("a.npz", "../a.npy", "/dev/zero", "case.yaml", "", "a.safetensors"))}
        case "identity":
            array = {"identity": shape[-1] if shape else 1}
        case "ascending" | "geometric":
            array = {kind: [number, draw.choice((1, 0.5, -2, number))], "shape": shape}
        case "ref":
            array = {"ref": draw.choice(("a", "b", "query"))} if draw.random() >= 0.8 else array | {"constant": 1}
    return array


def _nested(shape: list[int], make: Any) -> Any:
    return make() if not shape else [_nested(shape[1:], make) for _ in range(shape[0])]
