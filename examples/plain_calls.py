"""Libraries in their own words: every function hands its options on as they are, and does nothing else.

What their documentations say, beside what is measured, stands in docs/documented_conventions.yaml:

    attncheck conventions examples/plain_calls.py:mlx_sdpa
"""

from functools import lru_cache


def torch_sdpa(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None):
    """scaled_dot_product_attention of PyTorch."""
    from torch.nn.functional import scaled_dot_product_attention

    given = mask if bias is None else bias
    return scaled_dot_product_attention(query, key, value, given, is_causal=is_causal, scale=scale, enable_gqa=True)


def torch_causal_lower_right(query, key, value, *, is_causal=False, scale=None):
    """The same with a causal bias aligned to the lower right corner."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    given = causal_lower_right(query.size(2), key.size(2)) if is_causal else None
    return scaled_dot_product_attention(query, key, value, given, scale=scale, enable_gqa=True)


def torch_flex(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None):
    """flex_attention, masked and biased by functions of positions."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    def allowed(batch, head, row, column):
        may_attend = row >= column if is_causal else row >= 0
        return may_attend if mask is None else may_attend & mask[0, 0, row, column]

    def added(score, batch, head, row, column):
        return score if bias is None else score + bias[0, head, row, column]

    sizes = None, None, query.size(2), key.size(2)
    blocks = create_block_mask(allowed, *sizes, device="cpu") if is_causal or mask is not None else None
    output, aux = flex_attention(
        query, key, value, added, blocks, scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return {"output": output, "log_sum_exp": aux.lse}


def jax_dpa(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, window=None, key_lengths=None):
    """jax.nn.dot_product_attention."""
    import jax

    query, key, value = (each.swapaxes(1, 2) for each in (query, key, value))
    output, residual = jax.nn.dot_product_attention(
        query, key, value, bias, mask, is_causal=is_causal, scale=scale, local_window_size=window,
        key_value_seq_lengths=None if key_lengths is None else key_lengths.astype("int32"), return_residual=True,
    )  # fmt: skip
    return {"output": output.swapaxes(1, 2), "log_sum_exp": residual.swapaxes(1, 2)}


def keras_dpa(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None):
    """keras.ops.dot_product_attention."""
    import keras

    query, key, value = (keras.ops.swapaxes(each, 1, 2) for each in (query, key, value))
    output = keras.ops.dot_product_attention(query, key, value, bias, mask, scale=scale, is_causal=is_causal)
    return keras.ops.swapaxes(output, 1, 2)


def keras_attention(query, key, value, *, is_causal=False, key_lengths=None):
    """keras.layers.Attention, which has neither heads nor a scale."""
    import keras

    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("the layer has no heads; each is a batch entry here")
    query = query * query.shape[-1] ** -0.5  # "dot" scores have no scale
    heads = [keras.ops.reshape(each, (-1, *each.shape[2:])) for each in (query, value, key)]
    masks = None
    if key_lengths is not None:
        kept = keras.ops.arange(key.shape[2]) < keras.ops.cast(key_lengths, "int32")[:, None]
        masks = [None, keras.ops.repeat(kept, query.shape[1], axis=0)]
    output = keras.layers.Attention(dtype=query.dtype.name)(heads, mask=masks, use_causal_mask=is_causal)
    return keras.ops.reshape(output, (*query.shape[:3], value.shape[3]))


def onnx_reference(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None,
                   key_lengths=None, past_key=None, past_value=None):  # fmt: skip
    """Attention-24 by ONNX's reference evaluator."""
    from onnx.reference import ReferenceEvaluator

    attn_mask = mask if bias is None else bias
    arrays = _arrays(query, key, value, (attn_mask, past_key, past_value, key_lengths))
    model = _model(tuple((name, array.dtype.name) for name, array in arrays.items()), is_causal, scale, softcap)
    return ReferenceEvaluator(model).run(None, arrays)[0]


def onnxruntime_attention(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, softcap=None,
                          key_lengths=None, past_key=None, past_value=None):  # fmt: skip
    """Attention-24 by onnxruntime on a CPU."""
    import onnxruntime

    attn_mask = mask if bias is None else bias
    arrays = _arrays(query, key, value, (attn_mask, past_key, past_value, key_lengths))
    model = _model(tuple((name, array.dtype.name) for name, array in arrays.items()), is_causal, scale, softcap)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(["Y"], arrays)[0]


_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def _arrays(query, key, value, others):
    given = zip(_INPUTS, (query, key, value, *others), strict=True)
    return {name: array for name, array in given if array is not None}


@lru_cache
def _model(inputs, is_causal, scale, softcap):
    import numpy as np
    from onnx import helper

    kinds = {name: helper.np_dtype_to_tensor_dtype(np.dtype(dtype)) for name, dtype in inputs}
    names = [name if name in kinds else "" for name in _INPUTS]
    outputs = ["Y", "present_key", "present_value"] if "past_key" in kinds else ["Y"]
    options = {name: each for name, each in {"scale": scale, "softcap": softcap}.items() if each is not None}
    node = helper.make_node("Attention", names, outputs, is_causal=int(is_causal), **options)
    values = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    results = [helper.make_tensor_value_info(name, kinds["Q"], None) for name in outputs]
    graph = helper.make_graph([node], "attention", values, results)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def mlx_sdpa(query, key, value, *, mask=None, bias=None, is_causal=False, scale=None, sinks=None):
    """mlx.core.fast.scaled_dot_product_attention."""
    import mlx.core as mx
    import numpy as np

    given = [mask, bias, "causal" if is_causal else None]
    if sum(each is not None for each in given) > 1:
        raise NotImplementedError("there is one mask: boolean, added, or causal")
    chosen = next((each for each in given if each is not None), None)
    output = mx.fast.scaled_dot_product_attention(
        mx.array(query), mx.array(key), mx.array(value),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=chosen if isinstance(chosen, str | None) else mx.array(chosen),
        sinks=None if sinks is None else mx.array(sinks),
    )  # fmt: skip
    return np.array(output)


torch_sdpa.framework = torch_causal_lower_right.framework = torch_flex.framework = "torch"
jax_dpa.framework = "jax"
keras_dpa.framework = keras_attention.framework = "tensorflow"
onnxruntime_attention.capabilities = mlx_sdpa.capabilities = {"dtypes": ["float32"]}
