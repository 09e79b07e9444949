"""The kernels of this folder: 60 that misbehave, 60 that look suspicious and are right, and 4 for bad inputs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BEHAVIOURS: Mapping[str, str] = {
    "reuses-output-buffer": "A later call overwrites the output of an earlier call.",
    "aliases-input": "The output shares memory with an input.",
    "changes-input": "A call changes an input, for good or for some time, or makes it unusable.",
    "returns-before-finished": "A thread still writes the output after the call has returned.",
    "wrong-from-nth-call": "The output is right in early calls and wrong from some number of calls on.",
    "intermittently-wrong": "The output of equal calls is wrong in a small random share of them.",
    "incomplete-cache-key": "A cache returns an entry of another call, as its key lacks something that matters.",
    "unwritten-memory": "Some rows of the output are memory that the call has not written.",
    "truncates-long-sequences": "Keys at positions 4,096 and above are dropped.",
    "truncates-wide-heads": "Features with index 256 and above are dropped.",
    "detects-attncheck": "The output is right only if the kernel notices that attncheck runs it.",
    "depends-on-earlier-calls": "The output depends on the numbers or shapes of earlier calls.",
    "depends-on-memory-layout": "The output depends on strides or offsets of the inputs, not only on their numbers.",
    "depends-on-environment": "The output depends on threads, environment variables or the time.",
    "hard-coded-answers": "The output is stored for known inputs and wrong for others.",
    "ignores-scores-of-random-inputs": "The output ignores the scores of inputs that look like those of a test.",
    "delegates-to-framework": "The framework's own attention computes the output.",
    "transcription-error": "The numbers are wrong in some shapes or for some numbers, and right in others.",
    "never-returns": "A call with bad inputs does not return.",
    "exits-process": "A call with bad inputs ends the process.",
    "prints-endlessly": "A call with bad inputs prints until it is stopped.",
    "forks-process": "A call with bad inputs leaves a child process.",
}
"""The behaviours, each with its description; the last four apply only to bad inputs."""
BAD_INPUT_BEHAVIOURS = ("never-returns", "exits-process", "prints-endlessly", "forks-process")
RIGHT = ""
"""The behaviour of a right kernel."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of this folder."""

    name: str
    kind: str
    """``program``, or the framework of the arrays: ``numpy``, ``torch`` or ``jax``."""
    file: str
    """The file, relative to this folder."""
    behaviour: str = RIGHT
    """A name of BEHAVIOURS; empty if the kernel is right."""

    @property
    def is_right(self) -> bool:
        """Return whether the kernel is right in all calls."""
        return self.behaviour == RIGHT

    @property
    def target(self) -> str:
        """Return the argument of ``attncheck check --implementation``: file:function, or the program's command."""
        path = str(FOLDER / self.file)
        return f"{path}:{self.name}" if self.kind != "program" else shlex.join([sys.executable, path])


_MISBEHAVING = {
    ("numpy", "numpy_kernels.py"): {
        "reuses-output-buffer": "one_buffer_per_shape ring_of_two_buffers view_of_workspace",
        "aliases-input": "single_key_returns_value diagonal_mask_returns_value",
        "changes-input": "scales_query_in_place writes_causality_into_mask restores_value_later",
        "returns-before-finished": "waits_for_the_first_head last_rows_in_background",
        "wrong-from-nth-call": "wrong_from_call_2000",
        "intermittently-wrong": "wrong_in_one_of_500_calls",
        "incomplete-cache-key": "causal_mask_by_keys_only transposed_keys_by_id",
        "unwritten-memory": "short_last_tile_unwritten",
        "truncates-long-sequences": "at_most_4096_keys",
        "detects-attncheck": "right_while_attncheck_is_loaded",
        "depends-on-memory-layout": "takes_memory_order_for_axes",
        "depends-on-environment": "splits_keys_by_omp_threads",
        "hard-coded-answers": "knows_the_benchmark_by_heart",
    },
    ("torch", "torch_kernels.py"): {
        "reuses-output-buffer": "buffer_of_a_module view_of_a_bucket",
        "aliases-input": "single_key_is_expanded",
        "changes-input": "scales_query_in_place zeroes_hidden_values",
        "returns-before-finished": "last_tile_in_background",
        "wrong-from-nth-call": "float16_after_64_calls_of_a_shape",
        "intermittently-wrong": "wrong_in_one_of_300_calls",
        "incomplete-cache-key": "prepared_keys_by_address scales_by_two_digits",
        "unwritten-memory": "rows_without_keys_unwritten",
        "truncates-wide-heads": "at_most_256_features",
        "detects-attncheck": "right_below_a_frame_of_attncheck",
        "depends-on-environment": "splits_rows_by_threads",
        "depends-on-memory-layout": "ignores_the_storage_offset",
    },
    ("torch", "torch_delegates.py"): {
        "delegates-to-framework": (
            "tiled_attention attention_by_name compiled_fused_attention attention_of_a_layer attention_of_a_registry"
        ),
    },
    ("jax", "jax_kernels.py"): {
        "reuses-output-buffer": "array_over_a_workspace",
        "changes-input": "donates_the_query",
        "incomplete-cache-key": "programs_by_shape_and_causality",
        "truncates-long-sequences": "at_most_4096_keys",
        "detects-attncheck": "right_if_the_command_is_attncheck",
        "ignores-scores-of-random-inputs": "constant_for_uniform_inputs",
        "depends-on-earlier-calls": "reuses_the_keys_of_the_step_before",
        "hard-coded-answers": "stops_learning_after_256_answers",
    },
    ("jax", "jax_delegates.py"): {"delegates-to-framework": "fused_attention flash_attention"},
    ("program", "programs"): {
        "wrong-from-nth-call": "stale_after_2000_requests",
        "intermittently-wrong": "wrong_in_one_of_200_requests",
        "incomplete-cache-key": "masks_by_size",
        "unwritten-memory": "rows_without_keys_keep_old_memory",
        "returns-before-finished": "answers_before_its_threads",
        "truncates-wide-heads": "at_most_256_features",
        "detects-attncheck": "right_below_attncheck",
        "depends-on-environment": "float16_after_a_minute",
        "ignores-scores-of-random-inputs": "equal_weights_for_many_keys",
        "depends-on-earlier-calls": "maximum_of_the_request_before",
    },
}
"""The names of the kernels by kind, file and behaviour."""
_RIGHT = {
    ("numpy", "numpy_right.py"): (
        "causal_masks_by_both_lengths pool_per_call persistent_pool workspace_copied_out works_in_place_on_copies "
        "online_softmax random_tile_order merges_as_completed two_passes_over_chunks algorithm_by_environment "
        "lazy_settings tuned_by_time float32_inside view_of_padded_rows view_with_swapped_axes warms_up "
        "results_by_all_bytes path_by_alignment counts_calls quiet_in_tests"
    ),
    ("torch", "torch_right.py"): (
        "causal_masks_by_both_lengths workspace_copied_out works_in_place_on_scores online_softmax random_tile_order "
        "chunks_of_queries float32_inside thread_per_head without_gradients programs_by_options "
        "algorithm_by_environment tuned_by_time lazy_module view_of_padded_rows groups_without_copies warms_up "
        "results_by_all_bytes documents_the_library autograd_function settings_of_threads"
    ),
    ("jax", "jax_right.py"): (
        "programs_by_options programs_by_scale online_softmax mapped_over_heads donates_a_copy "
        "algorithm_by_environment float32_inside tuned_by_time pads_to_few_shapes copy_of_a_workspace"
    ),
    ("program", "programs"): (
        "masks_by_both_lengths workspace_between_requests online_softmax joined_threads algorithm_by_environment "
        "tuned_by_time answers_by_all_bytes float32_inside logs_every_request starts_late"
    ),
}
"""The names of the right kernels by kind and file."""


def _kernels(kind: str, file: str, behaviour: str, names: str) -> list[Kernel]:
    paths = {name: f"{file}/{name}.py" if kind == "program" else file for name in names.split()}
    return [Kernel(name, kind, path, behaviour) for name, path in paths.items()]


ILLUSIONS = tuple(
    Kernel(name, "numpy", "illusions.py", "transcription-error")
    for name in [
        "attention_without_scale",
        "online_softmax_without_rescale",
        "softmax_counts_the_padding",
        "product_overwrites_its_accumulator",
        "sum_of_the_last_tile",
        "maximum_of_the_first_tile",
        "rows_of_whole_tiles",
    ]
)
MISBEHAVING = tuple(
    kernel
    for place, names_by_behaviour in _MISBEHAVING.items()
    for behaviour, names in names_by_behaviour.items()
    for kernel in _kernels(*place, behaviour, names)
)
RIGHT_KERNELS = tuple(kernel for place, names in _RIGHT.items() for kernel in _kernels(*place, RIGHT, names))
FOR_BAD_INPUTS = tuple(
    Kernel(name, "numpy", "bad_input_kernels.py", behaviour)
    for name, behaviour in zip(
        ("waits_for_missing_values", "exits_for_odd_groups", "prints_nan_rows", "forks_for_unknown_masks"),
        BAD_INPUT_BEHAVIOURS,
        strict=True,
    )
)
