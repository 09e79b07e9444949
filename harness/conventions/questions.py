"""The questions: one call of attention each, and what it is if the implementation means this or that.

A meaning is the same problem with everything said: a mask in place of causality, a scale in place of none. Its exact
answer is what the call gives if that is meant, so that a question has to be asked with numbers for which no two
meanings have the same answer (``tests/harness/conventions`` proves that they have not, in every dtype). To ask another
one, add it to ``QUESTIONS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attncheck.spec import DEFAULT_EMPTY_ROWS, EMPTY_ROWS

Array = NDArray[Any]

WIDTH = 4
"""D and Dv: 1/sqrt(D) and 1/D are exact in every dtype."""
_SPREAD = 1.5
"""Standard deviation of queries and keys: weights differ, and none is nearly 1."""


@dataclass(frozen=True, eq=False)
class Call:
    """Options and inputs of a call of ``attention``, the inputs in float64."""

    options: Mapping[str, Any]
    inputs: Mapping[str, Array]

    def but(self, options: Mapping[str, Any] | None = None, /, **inputs: Array | None) -> Call:
        """Return the call with other options and inputs; what is None is left out."""
        chosen = {name: value for name, value in {**self.options, **(options or {})}.items() if value is not None}
        return Call(chosen, {name: array for name, array in {**self.inputs, **inputs}.items() if array is not None})


@dataclass(frozen=True, eq=False)
class Meaning:
    """What a call may mean, and by what that shows.

    Either the stage is the exact answer of ``problem``, times ``factor``; or every number of its ``rows`` (which count
    queries) is ``constant``, and all others are whatever they are.
    """

    words: str
    problem: Call | None = None
    factor: float = 1.0
    constant: float = 0.0
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True, eq=False)
class Question:
    """A call, and its meanings, of which the first is what attncheck's cases mean, unless they never ask it.

    ``declaration`` maps words to the value of ``empty_rows`` that declares this, where it can be declared.
    ``from_the_end`` is the call of a function whose own words count from the last query and key: its second meaning.
    """

    name: str
    asks: str
    call: Call
    meanings: tuple[Meaning, ...]
    stage: str = "output"
    declaration: Mapping[str, str] = field(default_factory=dict)
    is_in_cases: bool = True
    from_the_end: Call | None = None

    def counted_from_the_end(self, causal: str) -> Question:
        """Return the question for a function whose word for causality, and windows, count from the last query and key.

        The contract's words count from the first. What such a function is asked by its own word is then never called.
        """
        asked = replace(self, asks=self.asks.replace("is_causal", causal))
        if self.from_the_end is None:
            return asked
        first, second, *others = self.meanings
        return replace(asked, call=self.from_the_end, meanings=(second, first, *others))

    @property
    def expected(self) -> str:
        """What attncheck's cases mean; empty where they never ask it, or do not judge what comes back."""
        return self.meanings[0].words if self.is_in_cases else ""


def _normal(seed: int, *shape: int) -> Array:
    return np.random.RandomState(seed).standard_normal(shape) * _SPREAD


def _call(queries: int, keys: int, *, heads: int = 2, key_heads: int | None = None, batch: int = 1) -> Call:
    shape = batch, key_heads or heads, keys, WIDTH
    query = _normal(1, batch, heads, queries, WIDTH)
    return Call({}, {}).but(query=query, key=_normal(2, *shape), value=_normal(3, *shape))


def _mask(rows: str) -> Array:
    """Return a mask (1, 1, Lq, Lk) from rows such as ``"110 011"``, 1 where a query may attend to a key."""
    return np.array([[character == "1" for character in row] for row in rows.split()])[np.newaxis, np.newaxis]


def _causal(queries: int, keys: int, offset: int) -> Array:
    return (np.arange(keys) <= np.arange(queries)[:, np.newaxis] + offset)[np.newaxis, np.newaxis]


def _causality() -> list[Question]:
    few, many = _call(3, 5), _call(5, 3)
    past = _call(3, 3).but(past_key=_normal(4, 1, 2, 2, WIDTH), past_value=_normal(5, 1, 2, 2, WIDTH))
    causal, corner = {"is_causal": True}, "the corner is {}"
    top, bottom, ignored = corner.format("top left"), corner.format("bottom right"), "causality is left out"
    later = many.but(mask=_causal(5, 3, -2))
    masked = _call(4, 4).but(mask=_mask("1011 1101 0111 1011"))
    both = masked.inputs["mask"] & _causal(4, 4, 0)
    return [
        Question(
            "causal, more keys than queries",
            "which keys a query sees with is_causal",
            few.but(causal),
            (
                Meaning(top, few.but(mask=_causal(3, 5, 0))),
                Meaning(bottom, few.but(mask=_causal(3, 5, 2))),
                Meaning(ignored, few),
            ),
            from_the_end=few.but(mask=_causal(3, 5, 2)),
        ),
        Question(
            "causal, more queries than keys",
            "which keys a query sees with is_causal",
            many.but(causal),
            (
                Meaning(top, many.but(mask=_causal(5, 3, 0))),
                *(
                    Meaning(f"{bottom}, without a key: {value}", later.but({"empty_rows": value}))
                    for value in sorted(EMPTY_ROWS, key=DEFAULT_EMPTY_ROWS.__ne__)
                ),
                Meaning(ignored, many),
            ),
            from_the_end=later,
        ),
        Question(
            "causal, after a past",
            "where queries stand with is_causal, past_key and past_value",
            past.but(causal),
            (
                Meaning("after the past", past.but(mask=_causal(3, 5, 2))),
                Meaning("at the first key of the past", past.but(mask=_causal(3, 5, 0))),
                Meaning(ignored, past),
                Meaning("the past is left out", past.but(past_key=None, past_value=None, mask=_causal(3, 3, 0))),
            ),
            is_in_cases=False,  # they hand a mask over
        ),
        Question(
            "causal, with a mask",
            "which keys a query sees with is_causal and a mask",
            masked.but(causal),
            (
                Meaning("keys that both allow", masked.but(mask=both)),
                Meaning("only the mask counts", masked),
                Meaning("only causality counts", masked.but(mask=_causal(4, 4, 0))),
            ),
        ),
    ]


def _masks() -> list[Question]:
    masked = _call(3, 4).but(mask=_mask("1011 1100 0110"))
    biased = _call(3, 4).but(bias=_normal(6, 1, 2, 3, 4))
    empty = _call(3, 4).but(mask=_mask("1011 0000 0110"))
    unmasked, hidden = empty.but(mask=_mask("1011 1111 0110")), masked.but(mask=~masked.inputs["mask"])
    lengths = _call(3, 5, batch=2).but(key_lengths=np.array([2, 4]))
    first = np.arange(5) < np.array([2, 4]).reshape(2, 1, 1, 1)
    said = lengths.but(key_lengths=None)
    words = {"zero": "0", "uniform": "the mean of all values", "nan": "NaN"}
    return [
        Question(
            "mask",
            "what true means in a mask",
            masked,
            (
                Meaning("may attend", masked),
                Meaning("may not attend", hidden),
                Meaning("the mask is left out", masked.but(mask=None)),
            ),
        ),
        Question(
            "bias",
            "what a bias is added to",
            biased,
            (
                Meaning("the scaled scores", biased),
                Meaning("the scores before the scale", biased.but(bias=biased.inputs["bias"] * WIDTH**-0.5)),
                Meaning("the bias is left out", biased.but(bias=None)),
            ),
        ),
        Question(
            "a query without a key",
            "what the output is",
            empty,
            (
                *(Meaning(words[value], empty.but({"empty_rows": value})) for value in words),
                Meaning("as if nothing were masked", unmasked),
            ),
            declaration={text: value for value, text in words.items()},
        ),
        Question(
            "key_lengths",
            "which keys count",
            lengths,
            (
                Meaning("the first ones", said.but(mask=first)),
                Meaning("the last ones", said.but(mask=first[..., ::-1])),
                Meaning("one more than the first ones", said.but(mask=np.roll(first, 1, -1) | first)),
                Meaning("key_lengths are left out", said),
            ),
        ),
    ]


def _options() -> list[Question]:
    plain = _call(3, 4)
    window = _call(6, 6)
    across = _call(3, 6)
    capped = _call(3, 4).but({"softcap": 1.0}, bias=_normal(6, 1, 2, 3, 4))
    hidden = _call(3, 4).but({"softcap": 1.0}, mask=_mask("1011 1100 0110"))
    grouped = _call(3, 4, heads=4, key_heads=2)
    tiled = {name: grouped.inputs[name][:, [0, 1, 0, 1]] for name in ("key", "value")}
    left_out = "the softcap is left out"
    return [
        Question(
            "scale, by default",
            "what the scores are multiplied by",
            plain,
            (
                Meaning("1/sqrt(D)", plain.but({"scale": WIDTH**-0.5})),
                Meaning("1", plain.but({"scale": 1.0})),
                Meaning("1/D", plain.but({"scale": 1 / WIDTH})),
            ),
        ),
        Question(
            "scale, of 0",
            "what the scores are multiplied by",
            plain.but({"scale": 0.0}),
            (
                Meaning("0", plain.but({"scale": 0.0})),
                Meaning("as without a scale", plain.but({"scale": WIDTH**-0.5})),
                Meaning("1", plain.but({"scale": 1.0})),
            ),
        ),
        Question(
            "softcap, with a bias",
            "what is capped",
            capped,
            (
                Meaning("the scores before the bias", capped),
                Meaning("the scores with the bias", capped.but({"softcap_follows": "biased"})),
                Meaning(left_out, capped.but({"softcap": None})),
            ),
        ),
        Question(
            "softcap, with a mask",
            "what is capped",
            hidden,
            (
                Meaning("the scores before the mask", hidden),
                Meaning("the scores after the mask", hidden.but({"softcap_follows": "masked"})),
                Meaning(left_out, hidden.but({"softcap": None})),
            ),
        ),
        Question(
            "window (2, 0)",
            "how many keys a query sees",
            window.but({"window": (2, 0)}),
            (
                Meaning("its own and two before", window.but({"window": (2, 0)})),
                Meaning("its own and one before", window.but({"window": (1, 0)})),
                Meaning("its own and two before, and all after", window.but({"window": (2, None)})),
                Meaning("the window is left out", window),
            ),
        ),
        Question(
            "window (1, 1), more keys than queries",
            "where the first query stands",
            across.but({"window": (1, 1)}),
            (
                Meaning("at the first key", across.but({"window": (1, 1), "alignment": "top_left"})),
                Meaning(
                    "so that the last query stands at the last key",
                    across.but({"window": (1, 1), "alignment": "bottom_right"}),
                ),
                Meaning("the window is left out", across),
            ),
            from_the_end=across.but(mask=_causal(3, 6, 4) & ~_causal(3, 6, 1)),
        ),
        Question(
            "grouped heads",
            "which key head query head h takes",
            grouped,
            (Meaning("h // (H / Hkv)", grouped), Meaning("h % Hkv", grouped.but(None, **tiled))),
        ),
    ]


def _statistics() -> list[Question]:
    plain, empty = _call(3, 4), _call(3, 4).but(mask=_mask("1011 0000 0110"))
    own = slice(1, 2)
    return [
        Question(
            "log_sum_exp",
            "of which base it is",
            plain,
            (
                Meaning("e", plain),
                Meaning("2", plain, factor=float(np.log(2))),
                Meaning("e, of scores without a scale", plain.but({"scale": 1.0})),
            ),
            stage="log_sum_exp",
        ),
        Question(
            "log_sum_exp without a key",
            "what it is",
            empty,
            (
                Meaning("-inf", constant=-np.inf, rows=own),
                Meaning("0", constant=0.0, rows=own),
                Meaning("+inf", constant=np.inf, rows=own),
                Meaning("NaN", constant=np.nan, rows=own),
                Meaning("as if nothing were masked", empty.but(mask=_mask("1011 1111 0110"))),
            ),
            stage="log_sum_exp",
        ),
    ]


def _hidden_numbers() -> list[Question]:
    """Ask what a number does that nobody may attend to: at key 2, which is masked for every query."""
    masked = _call(3, 4).but(mask=_mask("1101 1001 0101"))
    found = []
    for name in ("key", "value"):
        for words, number in (("NaN", np.nan), ("infinity", np.inf)):
            array = masked.inputs[name].copy()
            array[..., 2, :] = number
            found.append(
                Question(
                    f"{words} in a masked {name}",
                    "what it does",
                    masked.but(None, **{name: array}),
                    (Meaning("nothing", masked), Meaning("it makes the output NaN", constant=np.nan)),
                    is_in_cases=False,  # what it does is open
                )
            )
    return found


QUESTIONS: tuple[Question, ...] = tuple(
    question for of_a_kind in (_causality, _masks, _options, _statistics, _hidden_numbers) for question in of_a_kind()
)
"""All questions, in the order in which they are shown."""
