"""The behaviours that the gate names: what speaks against merging a kernel, besides wrong numbers in a case.

The first four are observed around every call, by the process that makes it (``execution/call_server.py``). The others
follow from comparing calls: of other processes, of other numbers, and of the same numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attncheck.execution.call_server import CHANGED_INPUT, LATE, OVERWRITTEN, SHARED_MEMORY


@dataclass(frozen=True)
class Behaviour:
    """A behaviour: what it is, in a sentence, and what its author can do about it."""

    sentence: str
    advice: str


WRONG = "wrong"
FAILS = "fails"
WRONG_NOW_AND_THEN = "wrong-now-and-then"
WRONG_LATER = "wrong-after-many-calls"
DEPENDS_ON_CALLS = "depends-on-earlier-calls"
ONLY_KNOWN_CASES = "right-only-in-known-cases"
RECOGNISES_TESTS = "recognises-tests"
WRONG_BEYOND_SIZE = "wrong-beyond-a-size"
DEPENDS_ON_LAYOUT = "depends-on-memory-layout"
DEPENDS_ON_THREADS = "depends-on-threads"
DEPENDS_ON_ENVIRONMENT = "depends-on-environment"
DEPENDS_ON_TIME = "depends-on-time"
LEAVES_THREADS = "leaves-work-behind"
UNWRITTEN = "leaves-memory-unwritten"
DELEGATES = "delegates"

VARIED_SURROUNDINGS = (DEPENDS_ON_LAYOUT, DEPENDS_ON_THREADS, DEPENDS_ON_ENVIRONMENT, DEPENDS_ON_TIME)

BEHAVIOURS: Mapping[str, Behaviour] = {
    CHANGED_INPUT: Behaviour("A call changes an input, or makes it unusable.", "Copy what you change."),
    SHARED_MEMORY: Behaviour(
        "A result shares memory with an input: changing one changes the other.", "Return a copy: result.copy()."
    ),
    OVERWRITTEN: Behaviour(
        "A later call overwrites the result of an earlier one.", "Return a new array in every call."
    ),
    LATE: Behaviour(
        "A result still changes after the call has returned.", "Wait for all threads and streams before you return."
    ),
    LEAVES_THREADS: Behaviour(
        "A call leaves threads or processes that may still compute.", "Join them, or wait until the pool has finished."
    ),
    UNWRITTEN: Behaviour(
        "A result has memory that nobody wrote.", "Write every element, also in rows without keys and in last tiles."
    ),
    WRONG: Behaviour("The numbers are wrong.", "attncheck check and attncheck search find the smallest case."),
    FAILS: Behaviour("Calls end in an error, a crash or a timeout.", "Raise NotImplementedError for what you lack."),
    ONLY_KNOWN_CASES: Behaviour(
        "Every case that can be known beforehand is right, and other numbers are wrong.",
        "Look for stored answers, and for inputs that are treated differently.",
    ),
    RECOGNISES_TESTS: Behaviour(
        "The numbers are right in a process that shows that it is a test, and wrong in one that does not.",
        "Look for modules, frames, arguments and variables that the kernel reads.",
    ),
    DEPENDS_ON_CALLS: Behaviour(
        "The result depends on earlier calls: the same call is right in a new process.",
        "Look for caches and buffers whose key lacks what the two calls differ in.",
    ),
    WRONG_LATER: Behaviour(
        "The result is right at first, and wrong after many calls.", "Look for counters and for caches that fill up."
    ),
    WRONG_NOW_AND_THEN: Behaviour(
        "Some of many equal calls are wrong.", "Look for races between threads, and for random numbers."
    ),
    DELEGATES: Behaviour("It computes by calling another attention.", "Compute it, or allow delegation."),
    WRONG_BEYOND_SIZE: Behaviour(
        "Results are wrong from some size on.", "Look for a maximum, and for 16-bit or 32-bit offsets."
    ),
    DEPENDS_ON_LAYOUT: Behaviour(
        "The same numbers in another memory layout give wrong results.",
        "Use strides and storage offsets, or make inputs contiguous.",
    ),
    DEPENDS_ON_THREADS: Behaviour(
        "Results are wrong with another number of threads.", "Look at how work is divided between threads."
    ),
    DEPENDS_ON_ENVIRONMENT: Behaviour(
        "Results are wrong if some environment variables have other values.", "Look for reads of os.environ."
    ),
    DEPENDS_ON_TIME: Behaviour(
        "The result is right at first, and wrong some time later.", "Look for clocks, and for caches that expire."
    ),
}
"""By name, in the order in which they are printed."""
