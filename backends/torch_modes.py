"""The ways to compute attention in PyTorch besides eager code: compilers, kernels and modules, a ``Mode`` each."""

from __future__ import annotations

from dataclasses import replace

from attncheck.backends.entry import ABSORBED, EAGER_MODE, NATIVE, DeclaredConvention, Mode

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
TORCH_MODES = (
    Mode(
        "compile",
        "attncheck.backends.torch_compile",
        "torch.compile of the eager code",
        attribute="COMPILED",
        own_process=True,
        standard_only=True,
        folds_sequences=True,
    ),
    # Eager in 16 bits, too: what is not rewritten stores its scores.
    Mode(
        "compile_output",
        "attncheck.backends.torch_compile",
        "torch.compile of attention that returns only its output, which it may rewrite",
        attribute="OUTPUT",
        own_process=True,
        standard_only=True,
        folds_sequences=True,
    ),
    Mode(
        "sdpa",
        "attncheck.backends.torch_sdpa",
        "functional.scaled_dot_product_attention with the kernel that torch picks",
        classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute="DEFAULT",
        holds_scores=False,
        folds_sequences=True,
    ),
    Mode(
        "sdpa_math",
        "attncheck.backends.torch_sdpa",
        "functional.scaled_dot_product_attention with its math kernel, which keeps float32 between 16-bit ends",
        classes={**NATIVE, "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS,
        attribute="MATH",
        folds_sequences=True,
    ),
    Mode(
        "sdpa_flash",
        "attncheck.backends.torch_sdpa",
        "functional.scaled_dot_product_attention with its flash kernel, which refuses what it cannot compute",
        classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute="FLASH",
        holds_scores=False,
        folds_sequences=True,
    ),
    Mode(
        "causal_upper_left",
        "attncheck.backends.torch_causal_bias",
        "functional.scaled_dot_product_attention with nn.attention.bias.causal_upper_left",
        classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute="UPPER_LEFT",
        folds_sequences=True,
    ),
    Mode(
        "causal_lower_right",
        "attncheck.backends.torch_causal_bias",
        "functional.scaled_dot_product_attention with nn.attention.bias.causal_lower_right",
        classes={**NATIVE, "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute="LOWER_RIGHT",
    ),
    # The math kernel takes 16 bits to float32 unless tensors are nested (aten/src/ATen/native/transformers/
    # attention.cpp): it then stores every step, and the query times the root of the scale before all of them.
    Mode(
        "nested",
        "attncheck.backends.torch_nested",
        "functional.scaled_dot_product_attention of nested tensors",
        classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
    ),
    # Scores and softmax are float32, "working precision", and weights are cast to the query's dtype before they meet
    # the values (torch/_higher_order_ops/flex_attention.py, math_attention).
    Mode(
        "flex",
        "attncheck.backends.torch_flex",
        "nn.attention.flex_attention, not compiled: an implementation that writes the scores out",
        classes={**NATIVE, "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS_OF_FLEX,
        attribute="EAGER",
    ),
    Mode(
        "flex_compile",
        "attncheck.backends.torch_flex",
        "nn.attention.flex_attention in torch.compile: one kernel, made for its masks and scores",
        classes={"float32": "native", "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS_OF_FLEX,
        attribute="COMPILED",
        holds_scores=False,
        own_process=True,
        standard_only=True,
    ),
    Mode(
        "mha",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention without weights, which calls scaled_dot_product_attention",
        classes={**NATIVE, "bfloat16": "fused", "float16": "fused"},
        conventions=_ZERO_ROWS,
        attribute="WITHOUT_WEIGHTS",
    ),
    # The query is scaled and stored before its product with the keys, in the two below.
    Mode(
        "mha_weights",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention with weights, one operation after the other",
        classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
        attribute="WITH_WEIGHTS",
    ),
    Mode(
        "mha_fast",
        "attncheck.backends.torch_mha",
        "nn.MultiheadAttention on its fast path, for self-attention in C++",
        classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
        attribute="FAST",
    ),
    Mode("absorbed", "attncheck.backends.torch_backend", ABSORBED, attribute="ABSORBED"),
)


def _sdpa_on_cuda(name: str, attribute: str, kernel: str) -> Mode:
    # Either has a backward pass that adds up in float32 and stores the weights' gradient in 16 bits.
    return Mode(
        f"{name}@cuda",
        "attncheck.backends.torch_sdpa",
        f"functional.scaled_dot_product_attention with {kernel}, which refuses what it cannot compute",
        classes={"bfloat16": "fused_bwd", "float16": "fused_bwd"},
        conventions=_ZERO_ROWS,
        attribute=attribute,
        holds_scores=False,
        folds_sequences=True,
        device="cuda",
    )


def _on_cuda() -> tuple[Mode, ...]:
    eager = Mode(EAGER_MODE, "attncheck.backends.torch_backend", "modular code, one operation after the other")
    as_they_are = {"compile", "compile_output", "sdpa", "sdpa_math", "causal_upper_left", "causal_lower_right"}
    as_they_are |= {"flex", "flex_compile", "absorbed"}
    modes = (eager, *(mode for mode in TORCH_MODES if mode.name in as_they_are))
    return (
        *(
            replace(mode, name=f"{mode.name}@cuda", description=f"{mode.description}; on a GPU", device="cuda")
            for mode in modes
        ),
        _sdpa_on_cuda("sdpa_flash", "FLASH", "its flash kernel"),
        _sdpa_on_cuda("sdpa_cudnn", "CUDNN", "cuDNN's kernel"),
        replace(
            _sdpa_on_cuda("sdpa_efficient", "EFFICIENT", "its memory-efficient kernel"),
            classes={"float32": "native", "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        ),
    )


TORCH_DEVICE_MODES = _on_cuda()
