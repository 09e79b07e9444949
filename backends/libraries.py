"""Libraries that have attention of their own: what a model runs in once it is exported, a ``Mode`` for each call.

They are no frameworks: they have no eager code, run only where somebody names them (``-i onnxruntime``), and each is an
optional extra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from attncheck.backends.entry import (
    EAGER_PRE,
    FUSED,
    FUSED_BWD,
    NATIVE,
    BackendEntry,
    DeclaredConvention,
    Library,
    Mode,
    library_entry,
)

# "A fully-masked query row (no key attended) produces a zero output row, not NaN": the standard's text of Attention.
_ZERO_ROWS_OF_ONNX = {
    "empty_rows": DeclaredConvention(
        "zero",
        "The standard says so since its release 1.23: a query row without a key produces a zero output row, not NaN.",
        "https://onnx.ai/onnx/operators/onnx__Attention.html",
    )
}


def _onnxruntime_kernel_mode(name: str, attribute: str, stage: str) -> Mode:
    # Float16 is taken to float32 for each product and stored after it, and so is the softmax: AttentionGemm and
    # ComputeAttentionSoftmaxInplace in onnxruntime/core/providers/cpu/llm.
    return Mode(
        name,
        f"attncheck.backends.onnxruntime_attention:{attribute}",
        f"the kernel of Attention-24{stage}",
        classes={"float32": "native", "float16": "eager"},
        conventions=_ZERO_ROWS_OF_ONNX,
        folds_sequences=True,
    )


# The weights meet the values in the inputs' format; all else is float32, and powers are of 2. The interpreter
# multiplies the bits of bfloat16 as if they were integers: triton-lang/triton#11584, "we just don't support it yet".
_TRITON = Mode(
    "fused",
    "attncheck.backends.triton_attention",
    "a fused kernel in Triton, by its tutorial's algorithm; in Triton's interpreter",
    classes={"float32": "native", "float16": "fused"},
    stores_all_scores=False,
    folds_sequences=True,
    environment={"TRITON_INTERPRET": "1"},
)

_EQUAL_VALUE_WIDTH = {"value_width": "equal"}
_ONLY_FLOAT32 = {"float32": "native"}
_NO_SOFTCAP = {"softcap": ()}  # it is for JAX on TPUs alone
_BLOCKS_OF_TPU = {"query_length_multiple": 128, "key_length_multiple": 128}

# Statistics are float32, and so are sums. In jax/experimental/pallas/ops: gpu/attention.py, s_curr.astype(v.dtype) and
# ds.astype(q_ref.dtype) before the products; gpu/decode_attention.py stores the sum of each part of the keys, not yet
# divided, and adds up the parts in the inputs' format, which no rounding model allows in 16 bits,
# and so does gpu/paged_attention.py; tpu/flash_attention.py, p.astype(v.dtype) and ds.T.astype(do.dtype);
# splash_attention_kernel.py keeps its weights in float32 and has ds.astype(k.dtype), but its callers store the scaled
# query before.
_pallas = partial(Mode, stores_all_scores=False, runs_only_standard_cases=True)
_PALLAS = (
    _pallas(
        "gpu_mha",
        "attncheck.backends.pallas_gpu:MHA",
        "jax.experimental.pallas.ops.gpu.attention.mha; interpreted",
        classes={"float32": "native", "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        requires=_EQUAL_VALUE_WIDTH,
    ),
    _pallas(
        "gpu_decode",
        "attncheck.backends.pallas_gpu:DECODE",
        "jax.experimental.pallas.ops.gpu.decode_attention.gqa; interpreted",
        classes={"float32": "native"},
        requires={**_EQUAL_VALUE_WIDTH, "key_length_multiple": 16},
        folds_sequences=True,
    ),
    _pallas(
        "gpu_paged",
        "attncheck.backends.pallas_gpu:PAGED",
        "jax.experimental.pallas.ops.gpu.paged_attention; interpreted",
        classes={"float32": "native"},
        requires=_EQUAL_VALUE_WIDTH,
    ),
    _pallas(
        "tpu_flash",
        "attncheck.backends.pallas_tpu:FLASH",
        "jax.experimental.pallas.ops.tpu.flash_attention; interpreted",
        classes={"float32": "native", "bfloat16": "fused_bwd", "float16": "fused_bwd"},
        requires={**_EQUAL_VALUE_WIDTH, **_BLOCKS_OF_TPU},
        folds_sequences=True,
    ),
    _pallas(
        "tpu_splash",
        "attncheck.backends.pallas_tpu:SPLASH",
        "jax.experimental.pallas.ops.tpu.splash_attention; interpreted",
        classes={"float32": "native", "bfloat16": "eager_pre", "float16": "eager_pre"},
        requires=_BLOCKS_OF_TPU,
        folds_sequences=True,
    ),
)

# "sdpa" hands everything to scaled_dot_product_attention (transformers/integrations/sdpa_attention.py).
_ZERO_ROWS_OF_TORCH = {
    "empty_rows": DeclaredConvention(
        "zero",
        "sdpa and flex_attention call PyTorch's functions, which give zeros for a query whose keys are all masked.",
        "pytorch/pytorch#133882",
    )
}

_SOFTCAP_BEHIND_BIAS = {
    "softcap": DeclaredConvention(
        "behind_bias",
        "The softcap is applied to the scores with their bias, as the documentation of dot_product_attention says.",
        "https://github.com/openxla/tokamax/blob/main/tokamax/_src/ops/attention/api.py",
    )
}

_on_jax = partial(
    Library, family="keras", module="attncheck.backends.jax_jit:LIBRARY_JIT", runs_only_standard_cases=True
)
"""A call that is compiled."""

LIBRARIES: Mapping[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        library_entry(
            "onnxruntime",
            ("onnxruntime", "onnx"),
            "onnxruntime>=1.26",
            _onnxruntime_kernel_mode("attention", "KERNEL", ""),
            _onnxruntime_kernel_mode("scores", "SCORES", ", with qk_matmul_output_mode 0: the scaled product"),
            _onnxruntime_kernel_mode("capped", "CAPPED", ", with qk_matmul_output_mode 1: after the softcap"),
            _onnxruntime_kernel_mode("masked", "MASKED", ", with qk_matmul_output_mode 2: after softcap and mask"),
            _onnxruntime_kernel_mode("weights", "WEIGHTS", ", with qk_matmul_output_mode 3: the weights"),
            # Query and key are each multiplied by the root of the scale, and stored, before their product.
            Mode(
                "function",
                "attncheck.backends.onnxruntime_attention:FUNCTION",
                "Attention-25, for which there is no kernel: the function that the standard defines it by",
                classes={**NATIVE, "float16": "eager_pre"},
                conventions=_ZERO_ROWS_OF_ONNX,
                folds_sequences=True,
            ),
            # There is a kernel for float32 alone, and casts are put around it: InsertCastTransformer.
            Mode(
                "multi_head_attention",
                "attncheck.backends.onnxruntime_attention:MHA",
                "com.microsoft.MultiHeadAttention",
                classes={"float32": "native", "float16": "fused"},
                folds_sequences=True,
            ),
            # ApplyAttention in contrib_ops/cpu/bert/gqa_attention_base.h: float16 is taken to float32 where MLAS
            # has no product of float16, and stored in the output alone.
            Mode(
                "group_query_attention",
                "attncheck.backends.onnxruntime_attention:GQA",
                "com.microsoft.GroupQueryAttention",
                classes={"float32": "native", "float16": "fused"},
                stores_all_scores=False,
                requires={"width_multiple": 8, "value_width": "equal"},
                folds_sequences=True,
            ),
        ),
        library_entry(
            "onnx",
            ("onnx",),
            "onnx>=1.19",
            # Written in NumPy, whose products of float16 add up in float16: no rounding model has that.
            Mode(
                "reference",
                "attncheck.backends.onnx_attention:OUTPUT",
                "onnx.reference.ReferenceEvaluator on Attention-25",
                classes=NATIVE,
                conventions=_ZERO_ROWS_OF_ONNX,
                folds_sequences=True,
            ),
            *(
                Mode(
                    f"reference_{stage}",
                    f"attncheck.backends.onnx_attention:{stage.upper()}",
                    f"the same with qk_matmul_output_mode {number}",
                    classes=NATIVE,
                    conventions=_ZERO_ROWS_OF_ONNX,
                    folds_sequences=True,
                )
                for number, stage in enumerate(("scores", "capped", "masked", "weights"))
            ),
        ),
        library_entry(
            "triton",
            ("triton", "torch"),
            "triton>=3.7",  # NumPy 2.4 breaks the interpreter of those before: triton-lang/triton#9171
            _TRITON,
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
        ),
        library_entry(
            "mlx",
            ("mlx",),
            "mlx>=0.30",
            # scaled_dot_product_attention in mlx/fast.cpp, "fallback": multiply(array(scale, dtype), q) is stored,
            # and so are the scores; the softmax is "precise", in float32, and its weights are stored.
            Library(
                "sdpa",
                description="mlx.core.fast.scaled_dot_product_attention on a CPU",
                function_path="mlx.core.fast:scaled_dot_product_attention",
                family="mlx",
                family_changes={"numbers_in_float32": True},
                attribute="MLX",
                classes=EAGER_PRE,
            ),
            import_name="mlx.core",
        ),
        library_entry(
            "openvino",
            ("openvino",),
            "openvino>=2025.0",
            # Taken apart by ScaledDotProductAttentionDecomposition in src/common/transformations: the scale, of the
            # dtype, times the query, and each step an operation of its own.
            *(
                Library(
                    name,
                    description=f"ScaledDotProductAttention on a CPU, {hinted}",
                    function_path="attncheck.backends.openvino_sdpa:scaled_dot_product_attention",
                    family="sdpa",
                    fixed_arguments={"hint": name == "sdpa"},
                    module="attncheck.backends.openvino_sdpa:ARRAYS",
                    has_gradients=False,
                    classes={**floats, "bfloat16": "eager_pre"},
                )
                for name, hinted, floats in (
                    ("sdpa", "with the precision hint of the dtype", {"float32": "native", "float16": "eager_pre"}),
                    ("default", "as it comes: the processor decides what float32 is computed in", _ONLY_FLOAT32),
                )
            ),
        ),
        library_entry(
            "pallas",
            ("jax", "jaxlib"),
            "jax>=0.10",
            *_PALLAS,
            default_mode="tpu_splash",
        ),
        library_entry(
            "tokamax",
            ("tokamax", "jax", "jaxlib"),
            "tokamax>=0.0.12",
            *(
                Library(
                    implementation,
                    description=f"tokamax.dot_product_attention, implementation {implementation}",
                    function_path="tokamax:dot_product_attention",
                    family="keras",
                    fixed_arguments={
                        "implementation": implementation
                    },  # in chunks of its own, 512 queries and 1024 keys
                    module="attncheck.backends.jax_jit:TOKAMAX",
                    # base.py and xla_chunked.py in tokamax/_src/ops/attention: scores and softmax in float32; the
                    # preset of the second product, BF16_BF16_F32, rounds the weights.
                    # On a CPU it refuses float16: "The precision 'F16_F16_F32' is not supported by dot_general".
                    classes={"float32": "native", "bfloat16": "fused_bwd"},
                    conventions=_SOFTCAP_BEHIND_BIAS,
                    runs_only_standard_cases=True,
                )
                for implementation in ("xla", "xla_chunked")
            ),
        ),
        library_entry(
            "flax",
            ("flax", "jax", "jaxlib"),
            "flax>=0.12",
            # flax/nnx/nn/attention.py hands everything to jax.nn.dot_product_attention.
            _on_jax(
                "dpa",
                description="flax.nnx.dot_product_attention, which calls jax.nn.dot_product_attention",
                function_path="flax.nnx:dot_product_attention",
                classes={**NATIVE, "bfloat16": "fused_bwd"},
                requires=_EQUAL_VALUE_WIDTH,
            ),
            # The same file, dot_product_attention_weights: query / jnp.sqrt(depth) is stored, and so are scores
            # and weights.
            _on_jax(
                "sown",
                description="flax.nnx.dot_product_attention with a module, into which it sows its weights",
                function_path="attncheck.backends.library_arrays:flax_weights",
                family_changes={"weights": True},
                classes=EAGER_PRE,
            ),
            own_process_for=frozenset({"float64"}),
        ),
        library_entry(
            "keras",
            ("keras", "torch", "jax"),
            "keras>=3.9",
            # Keras casts float64 to float32: its result_type has no 64 bits.
            # keras/src/backend/torch/nn.py calls scaled_dot_product_attention, with a mask that is added.
            Library(
                "torch_dpa",
                description="keras.ops.dot_product_attention on PyTorch",
                function_path="keras.ops:dot_product_attention",
                family="keras",
                family_changes={**_NO_SOFTCAP, "bias_beside_mask": False},
                module="attncheck.backends.torch_sdpa:KERAS",
                has_gradients=False,
                classes={"float32": "native", "bfloat16": "fused_bwd", "float16": "fused_bwd"},
                own_process=True,
                environment={"KERAS_BACKEND": "torch"},
            ),
            # keras/src/backend/jax/nn.py calls jax.nn.dot_product_attention.
            Library(
                "jax_dpa",
                description="keras.ops.dot_product_attention on JAX, in jax.jit",
                function_path="keras.ops:dot_product_attention",
                family="keras",
                family_changes=_NO_SOFTCAP,
                module="attncheck.backends.jax_jit:KERAS",
                classes={"float32": "native", "bfloat16": "fused_bwd"},
                requires=_EQUAL_VALUE_WIDTH,
                own_process=True,
                runs_only_standard_cases=True,
                environment={"KERAS_BACKEND": "jax"},
            ),
        ),
        library_entry(
            "paddle",
            ("paddlepaddle",),
            "paddlepaddle>=3.3",
            # _math_attention in paddle/nn/functional/flash_attention.py. Its products have no kernel for 16 bits on
            # a CPU.
            Library(
                "sdpa",
                description="paddle.nn.functional.scaled_dot_product_attention on a CPU",
                function_path="paddle.nn.functional:scaled_dot_product_attention",
                family="sdpa",
                family_changes={"layout": "BLHD"},  # and a mask beside is_causal is ignored, as its documentation warns
                attribute="PADDLE",
                classes=NATIVE,
                requires=_EQUAL_VALUE_WIDTH,
            ),
            import_name="paddle",
        ),
        library_entry(
            "diffusers",
            ("diffusers", "torch"),
            "diffusers>=0.36",
            Library(
                "native",
                function_path="diffusers.models.attention_dispatch:dispatch_attention_fn",
                family="sdpa",
                family_changes={"layout": "BLHD"},
                module="attncheck.backends.torch_sdpa:LIBRARY",
                classes=FUSED_BWD,
                conventions=_ZERO_ROWS_OF_TORCH,
                stores_all_scores=False,
            ),
            Library(
                "flex",
                description="dispatch_attention_fn of diffusers with its backend flex; not compiled",
                function_path="diffusers.models.attention_dispatch:dispatch_attention_fn",
                family="sdpa",
                family_changes={"layout": "BLHD"},
                fixed_arguments={"backend": "flex"},
                module="attncheck.backends.torch_sdpa:LIBRARY",
                classes=FUSED,
                conventions=_ZERO_ROWS_OF_TORCH,
                own_process=True,
                environment={"TORCHDYNAMO_DISABLE": "1"},
            ),
            *(
                Library(
                    kernel,
                    description=f"dispatch_attention_fn of diffusers with its backend _native_{kernel}",
                    function_path="diffusers.models.attention_dispatch:dispatch_attention_fn",
                    family="sdpa",
                    family_changes={"layout": "BLHD", **differs},
                    fixed_arguments={"backend": f"_native_{kernel}"},
                    module="attncheck.backends.torch_sdpa:LIBRARY",
                    classes=classes,
                    conventions=_ZERO_ROWS_OF_TORCH,
                    stores_all_scores=kernel == "math",
                    requires=requires,
                )
                for kernel, classes, differs, requires in (
                    ("math", FUSED_BWD, {}, {}),
                    ("flash", FUSED_BWD, {"mask": ""}, _EQUAL_VALUE_WIDTH),
                )
            ),
        ),
        library_entry(
            "x_transformers",
            ("x-transformers", "torch"),
            "x-transformers>=2.31",
            # x_transformers/attend.py, Attend.forward: scores and weights are stored, the softmax is float32.
            Library(
                "attend",
                function_path="x_transformers.attend:Attend().forward",
                family="keras",
                family_changes={
                    **{"layout": "BHLD", "heads": "tiled", "causal": "causal", "corner": "bottom right"},
                    **{"causal_beside_mask": False, "bias": "attn_bias"},
                },
                module="attncheck.backends.torch_sdpa:LIBRARY",
                classes={"float32": "native", "bfloat16": "eager", "float16": "eager"},
            ),
            import_name="x_transformers",
        ),
        library_entry(
            "equinox",
            ("equinox", "jax", "jaxlib"),
            "equinox>=0.13",
            # equinox/nn/_attention.py: query / sqrt(d) is stored, and so are scores and weights.
            _on_jax(
                "mha",
                description="equinox.nn.MultiheadAttention, without its projections",
                function_path="attncheck.backends.library_arrays:equinox_attention",
                family_changes={"full_mask": True},
                classes=EAGER_PRE,
            ),
            own_process_for=frozenset({"float64"}),
        ),
        library_entry(
            "haiku",
            ("dm-haiku", "jax", "jaxlib"),
            "dm-haiku>=0.0.17",
            # haiku/_src/attention.py: scores, scores / sqrt(d) and weights are stored.
            _on_jax(
                "mha",
                description="haiku.MultiHeadAttention, without its projections",
                function_path="attncheck.backends.library_arrays:haiku_attention",
            ),
            own_process_for=frozenset({"float64"}),
            import_name="haiku",
        ),
        library_entry(
            "timm",
            ("timm", "torch"),
            "timm>=1.0.3",
            *(
                Library(
                    name,
                    description=f"timm.layers.Attention, without its projections, {of_timm}",
                    function_path="attncheck.backends.library_arrays:timm_attention",
                    family="sdpa",
                    fixed_arguments={"fused": fused},
                    family_changes={"layout": "BLHD"},
                    module="attncheck.backends.torch_sdpa:LIBRARY",
                    requires={**_EQUAL_VALUE_WIDTH, "lengths": "equal"},
                    **declared,
                )
                for name, fused, of_timm, declared in (
                    (
                        "fused",
                        True,
                        "which calls scaled_dot_product_attention",
                        {"classes": FUSED_BWD, "conventions": _ZERO_ROWS_OF_TORCH, "stores_all_scores": False},
                    ),
                    # timm/layers/attention.py: the query is scaled and stored, and so are scores and weights.
                    ("eager", False, "with set_fused_attn(False)", {"classes": EAGER_PRE}),
                )
            ),
        ),
        library_entry(
            "tinygrad",
            ("tinygrad",),
            "tinygrad>=0.14",
            Library(
                "sdpa",
                description="tinygrad.Tensor.scaled_dot_product_attention on a CPU, compiled by clang",
                function_path="tinygrad:Tensor.scaled_dot_product_attention",
                family="sdpa",
                attribute="TINYGRAD",
                # tinygrad/mixin/rand.py and op.py: scores are stored, and so are weights. bfloat16 needs clang 17.
                classes={**NATIVE, "float16": "eager"},
                runs_only_standard_cases=True,
            ),
            environment={"DEV": "CPU", "PARALLEL": "0"},  # compilers in processes of their own would outlive ours
        ),
        library_entry(
            "transformers",
            ("transformers", "torch"),
            "transformers>=5.18",
            # Products, their scaling and the mask are each stored in the dtype, and so are weights: "upcast
            # attention to fp32" is the softmax alone (eager_attention_forward in transformers/models).
            Mode(
                "eager",
                "attncheck.backends.transformers_attention:EAGER",
                "eager_attention_forward of Llama, or of a model that has the option, with masks of masking_utils",
            ),
            Mode(
                "sdpa",
                "attncheck.backends.transformers_attention:SDPA",
                "the attention interface sdpa, with masks of masking_utils",
                classes=FUSED_BWD,
                conventions=_ZERO_ROWS_OF_TORCH,
                stores_all_scores=False,
            ),
            # Scores and softmax are float32, and weights are cast to the query's dtype before they meet the values
            # (torch/_higher_order_ops/flex_attention.py, math_attention). Compiled, each shape and mask takes most
            # of a minute: https://docs.pytorch.org/docs/stable/torch.compiler_troubleshooting.html has the switch.
            Mode(
                "flex",
                "attncheck.backends.transformers_attention:FLEX",
                "the attention interface flex_attention, with masks of masking_utils; not compiled",
                classes=FUSED,
                conventions=_ZERO_ROWS_OF_TORCH,
                own_process=True,
                environment={"TORCHDYNAMO_DISABLE": "1"},
            ),
            default_mode="sdpa",
        ),
    )
}
