"""The part that the programs of this folder share: the protocol of docs/protocol.md, and the kernel of the README."""

import json
import math
import sys

import numpy as np


def serve(attention, dtypes=("float64", "float32")):
    """Answer requests with a function of (query, key, value, mask, is_causal, scale) until the input ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    for line in source:
        request = json.loads(line)
        if request["ask"] == "describe":
            functions = {"attention": ["mask", "is_causal", "scale"]}
            header = {"attncheck": 1, "name": "program", "functions": functions, "dtypes": list(dtypes)}
            payload = b""
        else:
            arrays = {}
            for listed in request["arrays"]:
                dtype, shape = np.dtype(listed["dtype"]), listed["shape"]
                data = source.read(math.prod(shape) * dtype.itemsize)
                arrays[listed["name"]] = np.frombuffer(data, dtype).reshape(shape)
            if request["function"] != "attention":
                header, payload = {"unsupported": "only attention is implemented"}, b""
            else:
                query, options = arrays["query"], request["options"]
                is_causal, scale = options.get("is_causal", False), options.get("scale")
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                output = attention(query, arrays["key"], arrays["value"], arrays.get("mask"), is_causal, scale)
                header = {"stages": [{"name": "output", "dtype": str(output.dtype), "shape": list(output.shape)}]}
                payload = output.tobytes()
        sink.write(json.dumps(header).encode() + b"\n" + payload)
        sink.flush()


def weights_of(query, key, mask=None, is_causal=False, scale=1.0):
    """Return the weights (B, H, Lq, Lk)."""
    return softmax(masked_scores(query, key, mask, is_causal, scale))


def masked_scores(query, key, mask=None, is_causal=False, scale=1.0):
    """Return the masked scores (B, H, Lq, Lk)."""
    scores = query @ np.swapaxes(repeat_heads(key, query), -1, -2) * np.asarray(scale, query.dtype)
    if is_causal:
        causal = np.tri(*scores.shape[-2:], dtype=bool)
        mask = causal if mask is None else mask & causal
    return scores if mask is None else np.where(mask, scores, scores.dtype.type(-np.inf))


def softmax(scores):
    """Return the softmax of scores, with zeros for rows without keys."""
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    powers = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return powers / np.where(total == 0, 1, total)


def attend(query, key, value, mask=None, is_causal=False, scale=1.0):
    """Return the output (B, H, Lq, Dv)."""
    return weights_of(query, key, mask, is_causal, scale) @ repeat_heads(value, query)


def average(query, key, value, mask=None, is_causal=False, scale=1.0):
    """Return the mean of the allowed values: a cheap stand-in for the output."""
    return attend(np.zeros_like(query), key, value, mask, is_causal, scale)


def without_last_key(query, key, value, mask=None, is_causal=False, scale=1.0):
    """Return the output without the last key."""
    shown = None if mask is None else mask[..., :-1] if mask.shape[-1] == key.shape[2] else mask
    return attend(query, key[:, :, :-1], value[:, :, :-1], shown, is_causal, scale)


def repeat_heads(array, query):
    """Return an array with as many heads as the query."""
    return np.repeat(array, query.shape[1] // array.shape[1], axis=1)


def online(query, key, value, mask=None, is_causal=False, scale=1.0, *, tile=32):
    """Return the output by tiles of keys with a running maximum."""
    scores, value = masked_scores(query, key, mask, is_causal, scale), repeat_heads(value, query)
    top = np.full((*scores.shape[:-1], 1), -np.inf, scores.dtype)
    total, output = np.zeros_like(top), np.zeros((*scores.shape[:-1], value.shape[-1]), scores.dtype)
    for start in range(0, scores.shape[-1], tile):
        part = scores[..., start : start + tile]
        higher = np.maximum(top, part.max(axis=-1, keepdims=True))
        shift = np.where(np.isneginf(higher), 0, higher)
        powers, factor = np.exp(part - shift), np.exp(top - shift)
        total = total * factor + powers.sum(axis=-1, keepdims=True)
        output = output * factor + powers @ value[:, :, start : start + tile]
        top = higher
    return output / np.where(total == 0, 1, total)
