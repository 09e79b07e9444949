"""Libraries that have attention of their own: what a model runs in once it is exported, a ``Mode`` for each call.

They are no frameworks: they have no eager code, run only where somebody names them (``-i onnxruntime``), and each is an
optional extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attncheck.backends.entry import NATIVE, BackendEntry, DeclaredConvention, Mode

# "A fully-masked query row (no key attended) produces a zero output row, not NaN": the standard's text of Attention.
_ZERO_ROWS_OF_ONNX = {
    "empty_rows": DeclaredConvention(
        "zero",
        "The standard says so since its release 1.23: a query row without a key produces a zero output row, not NaN.",
        "https://onnx.ai/onnx/operators/onnx__Attention.html",
    )
}


def _kernel(name: str, attribute: str, stage: str) -> Mode:
    # Float16 is taken to float32 for each product and stored after it, and so is the softmax: AttentionGemm and
    # ComputeAttentionSoftmaxInplace in onnxruntime/core/providers/cpu/llm.
    return Mode(
        name,
        "attncheck.backends.onnxruntime_attention",
        f"the kernel of Attention-24{stage}",
        classes={"float32": "native", "float16": "eager"},
        conventions=_ZERO_ROWS_OF_ONNX,
        attribute=attribute,
        folds_sequences=True,
    )


# The weights meet the values in the inputs' format; all else is float32, and powers are of 2. The interpreter
# multiplies the bits of bfloat16 as if they were integers: triton-lang/triton#11584, "we just don't support it yet".
_TRITON = Mode(
    "fused",
    "attncheck.backends.triton_attention",
    "a fused kernel in Triton, by its tutorial's algorithm; in Triton's interpreter",
    classes={"float32": "native", "float16": "fused"},
    holds_scores=False,
    folds_sequences=True,
    environment={"TRITON_INTERPRET": "1"},
)


LIBRARIES: Mapping[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry(
            "onnxruntime",
            "",
            ("onnxruntime", "onnx"),
            default_mode="attention",
            modes=(
                _kernel("attention", "KERNEL", ""),
                _kernel("scores", "SCORES", ", with qk_matmul_output_mode 0: the scaled product"),
                _kernel("capped", "CAPPED", ", with qk_matmul_output_mode 1: behind the softcap"),
                _kernel("masked", "MASKED", ", with qk_matmul_output_mode 2: behind softcap and mask"),
                _kernel("weights", "WEIGHTS", ", with qk_matmul_output_mode 3: the weights"),
                # Query and key are each multiplied by the root of the scale, and stored, before their product.
                Mode(
                    "function",
                    "attncheck.backends.onnxruntime_attention",
                    "Attention-25, for which there is no kernel: the function that the standard defines it by",
                    classes={**NATIVE, "float16": "eager_pre"},
                    conventions=_ZERO_ROWS_OF_ONNX,
                    attribute="FUNCTION",
                    folds_sequences=True,
                ),
            ),
            requirement="onnxruntime>=1.23",
        ),
        BackendEntry(
            "onnx",
            "",
            ("onnx",),
            default_mode="reference",
            modes=(
                # Written in NumPy, whose products of float16 add up in float16: no rounding model has that.
                Mode(
                    "reference",
                    "attncheck.backends.onnx_reference",
                    "onnx.reference.ReferenceEvaluator on Attention-25",
                    classes=NATIVE,
                    conventions=_ZERO_ROWS_OF_ONNX,
                    attribute="OUTPUT",
                    folds_sequences=True,
                ),
                *(
                    Mode(
                        f"reference_{stage}",
                        "attncheck.backends.onnx_reference",
                        f"the same with qk_matmul_output_mode {number}",
                        classes=NATIVE,
                        conventions=_ZERO_ROWS_OF_ONNX,
                        attribute=stage.upper(),
                        folds_sequences=True,
                    )
                    for number, stage in enumerate(("scores", "capped", "masked", "weights"))
                ),
            ),
            requirement="onnx>=1.19",
        ),
        BackendEntry(
            "triton",
            "",
            ("triton", "torch"),
            default_mode="fused",
            modes=(_TRITON,),
            device_modes=(
                replace(
                    _TRITON,
                    name="fused@cuda",
                    description="a fused kernel in Triton, by its tutorial's algorithm; on a GPU",
                    classes={"float32": "native", "bfloat16": "fused", "float16": "fused"},
                    environment={},
                    device="cuda",
                ),
            ),
            requirement="triton>=3.7",  # NumPy 2.4 breaks the interpreter of those before: triton-lang/triton#9171
        ),
        BackendEntry(
            "mlx",
            "",
            ("mlx",),
            default_mode="sdpa",
            modes=(
                # scaled_dot_product_attention in mlx/fast.cpp, "fallback": multiply(array(scale, dtype), q) is stored,
                # and so are the scores; the softmax is "precise", in float32, and its weights are stored.
                Mode(
                    "sdpa",
                    "attncheck.backends.mlx_fast",
                    "mlx.core.fast.scaled_dot_product_attention on a CPU",
                    classes={**NATIVE, "bfloat16": "eager_pre", "float16": "eager_pre"},
                    folds_sequences=True,
                ),
            ),
            imported="mlx.core",
            requirement="mlx>=0.30",
        ),
        BackendEntry(
            "openvino",
            "",
            ("openvino",),
            default_mode="sdpa",
            modes=(
                # Taken apart by ScaledDotProductAttentionDecomposition in src/common/transformations: the scale, of the
                # dtype, times the query, and each step an operation of its own.
                Mode(
                    "sdpa",
                    "attncheck.backends.openvino_sdpa",
                    "ScaledDotProductAttention on a CPU, with the precision hint of the dtype",
                    classes={"float32": "native", "bfloat16": "eager_pre", "float16": "eager_pre"},
                    folds_sequences=True,
                ),
            ),
            requirement="openvino>=2025.0",
        ),
    )
}
