"""The ways to compute attention in PyTorch besides eager code: compilers, kernels and modules, a ``Mode`` each."""

from __future__ import annotations

from dataclasses import replace

from attncheck.backends.entry import (
    ABSORBED,
    EAGER,
    EAGER_MODE,
    EAGER_PRE,
    FUSED,
    FUSED_BWD,
    DeclaredConvention,
    Library,
    Mode,
)

# The pull request changes "the stance of SDPA on what to do for fully masked out rows": NaN until then, zeros since.
_ZERO_ROWS = {
    "empty_rows": DeclaredConvention(
        "zero",
        "scaled_dot_product_attention gives zeros for a query whose keys are all masked, so that NaN spreads to no "
        "gradient: its softmax is a safe one.",
        "pytorch/pytorch#133882",
    )
}
_ZERO_ROWS_OF_FLEX = {
    "empty_rows": DeclaredConvention(
        "zero",
        "flex_attention handles rows whose keys are all masked apart: zeros, and minus infinity as their log_sum_exp.",
        "pytorch/pytorch#134650",
    )
}


def _sdpa_mode(name: str, function: str, kernel: str) -> Library:
    # The backward pass adds up in float32 and stores the weights' gradient in 16 bits.
    return Library(
        name,
        description=f"functional.scaled_dot_product_attention with {kernel}",
        function_path=f"attncheck.backends.torch_sdpa:{function}",
        family="sdpa",
        family_changes={"causal_beside_mask": True},
        module="attncheck.backends.torch_sdpa:LIBRARY",
        classes=FUSED_BWD,
        conventions=_ZERO_ROWS,
        stores_all_scores=False,
    )


TORCH_MODES: tuple[Mode, ...] = (
    Mode(
        "compile",
        "attncheck.backends.torch_compile:COMPILED",
        "torch.compile of the eager code",
        own_process=True,
        runs_only_standard_cases=True,
        folds_sequences=True,
    ),
    # Eager in 16 bits, too: what is not rewritten stores its scores.
    Library(
        "compile_output",
        description="torch.compile of attention that returns only its output, which it may rewrite",
        function_path="attncheck.backends.torch_compile:fused",
        family="sdpa",
        family_changes={"mask_kinds": frozenset({"added"})},
        module="attncheck.backends.torch_compile:OUTPUT",
        classes=EAGER,
        own_process=True,
        runs_only_standard_cases=True,
    ),
    _sdpa_mode("sdpa", "attention_with_chosen_kernel", "the kernel that torch picks"),
    replace(
        _sdpa_mode("sdpa_math", "math", "its math kernel, which keeps float32 between 16-bit ends"),
        classes=FUSED,
        stores_all_scores=True,
    ),
    _sdpa_mode("sdpa_flash", "flash", "its flash kernel, which refuses what it cannot compute"),
    Mode(
        "causal_upper_left",
        "attncheck.backends.torch_sdpa:UPPER_LEFT",
        "functional.scaled_dot_product_attention with nn.attention.bias.causal_upper_left",
        classes=FUSED_BWD,
        conventions=_ZERO_ROWS,
        folds_sequences=True,
    ),
    Mode(
        "causal_lower_right",
        "attncheck.backends.torch_sdpa:LOWER_RIGHT",
        "functional.scaled_dot_product_attention with nn.attention.bias.causal_lower_right",
        classes=FUSED_BWD,
        conventions=_ZERO_ROWS,
    ),
    # The math kernel takes 16 bits to float32 unless tensors are nested (aten/src/ATen/native/transformers/
    # attention.cpp): it then stores every step, and the query times the root of the scale before all of them.
    Mode(
        "nested",
        "attncheck.backends.torch_sdpa:NESTED",
        "functional.scaled_dot_product_attention of nested tensors",
        classes=EAGER_PRE,
    ),
    # Scores and softmax are float32, "working precision", and weights are cast to the query's dtype before they meet
    # the values (torch/_higher_order_ops/flex_attention.py, math_attention).
    Mode(
        "flex",
        "attncheck.backends.torch_compile:FLEX",
        "nn.attention.flex_attention, not compiled: an implementation that writes the scores out",
        classes=FUSED,
        conventions=_ZERO_ROWS_OF_FLEX,
    ),
    Mode(
        "flex_compile",
        "attncheck.backends.torch_compile:FLEX_COMPILED",
        "nn.attention.flex_attention in torch.compile: one kernel, made for its masks and scores",
        classes={"float32": "native", "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS_OF_FLEX,
        stores_all_scores=False,
        own_process=True,
        runs_only_standard_cases=True,
    ),
    Mode(
        "mha",
        "attncheck.backends.torch_mha:WITHOUT_WEIGHTS",
        "nn.MultiheadAttention without weights, which calls scaled_dot_product_attention",
        classes=FUSED,
        conventions=_ZERO_ROWS,
    ),
    # The query is scaled and stored before its product with the keys, in the two below.
    Mode(
        "mha_weights",
        "attncheck.backends.torch_mha:WITH_WEIGHTS",
        "nn.MultiheadAttention with weights, one operation after the other",
        classes=EAGER_PRE,
    ),
    Mode(
        "mha_fast",
        "attncheck.backends.torch_mha:FAST",
        "nn.MultiheadAttention on its fast path, for self-attention in C++",
        classes=EAGER_PRE,
    ),
    Mode("absorbed", "attncheck.backends.torch_backend:ABSORBED", ABSORBED),
)


def _make_cuda_modes() -> tuple[Mode, ...]:
    eager = Mode(EAGER_MODE, "attncheck.backends.torch_backend", "modular code, one operation after the other")
    as_they_are = {"compile", "compile_output", "sdpa", "sdpa_math", "causal_upper_left", "causal_lower_right"}
    as_they_are |= {"flex", "flex_compile", "absorbed"}
    modes = (eager, *(mode for mode in TORCH_MODES if mode.name in as_they_are))
    return (
        *(
            replace(mode, name=f"{mode.name}@cuda", description=f"{mode.description}; on a GPU", device="cuda")
            for mode in modes
        ),
        *(
            replace(
                _sdpa_mode(f"sdpa_{function}@cuda", function, f"{kernel}, which refuses what it cannot compute"),
                classes={**of_float32, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
                device="cuda",
            )
            for function, kernel, of_float32 in (
                ("flash", "its flash kernel", {}),
                ("cudnn", "cuDNN's kernel", {}),
                ("efficient", "its memory-efficient kernel", {"float32": "native"}),
            )
        ),
    )


TORCH_DEVICE_MODES = _make_cuda_modes()
