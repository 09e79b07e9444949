"""PyTorch kernels that look suspicious and are right: caches, threads, workspaces, tuning and compiled programs.

attncheck check --implementation benchmarks/gate_kernels/torch_right.py:causal_masks_by_both_lengths
"""

import hashlib
import os
import random
import threading
import time

import torch
from torch.fx.experimental.proxy_tensor import make_fx

framework = "torch"


def _scores(query, key, mask=None, is_causal=False, scale=None):
    """Return the masked scores (B, H, Lq, Lk)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ _repeat_heads(key, query).transpose(-1, -2) * scale
    allowed = _allowed(query, key, mask, is_causal)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _allowed(query, key, mask, is_causal):
    """Return which scores take part, or None for all."""
    if not is_causal:
        return mask
    causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    return causal if mask is None else mask & causal


def _softmax(scores):
    if not scores.shape[-1]:
        return scores
    top = scores.amax(dim=-1, keepdim=True)
    powers = torch.exp(scores - torch.where(torch.isfinite(top), top, 0))
    total = powers.sum(dim=-1, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


def _attend(query, key, value, mask=None, is_causal=False, scale=None):
    """Return the output (B, H, Lq, Dv)."""
    return _softmax(_scores(query, key, mask, is_causal, scale)) @ _repeat_heads(value, query)


def _repeat_heads(array, query):
    return array.repeat_interleave(query.shape[1] // array.shape[1], dim=1)


def _online(query, key, value, mask=None, is_causal=False, scale=None, *, tile=64, order=None):
    """Return the output by tiles of keys."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    total, output = torch.zeros_like(top), scores.new_zeros(*scores.shape[:-1], value.shape[-1])
    starts = list(range(0, scores.shape[-1], tile))
    for start in starts if order is None else order(starts):
        part = scores[..., start : start + tile]
        higher = torch.maximum(top, part.amax(dim=-1, keepdim=True))
        shift = torch.where(torch.isneginf(higher), 0, higher)
        powers, factor = torch.exp(part - shift), torch.exp(top - shift)
        total = total * factor + powers.sum(dim=-1, keepdim=True)
        output = output * factor + powers @ value[:, :, start : start + tile]
        top = higher
    return output / torch.where(total == 0, 1, total)


_CAUSAL_MASKS = {}


def causal_masks_by_both_lengths(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps causal masks by both lengths and the device."""
    if is_causal:
        place = query.shape[2], key.shape[2], query.device
        if place not in _CAUSAL_MASKS:
            _CAUSAL_MASKS[place] = torch.ones(*place[:2], dtype=torch.bool, device=query.device).tril()
        mask = _CAUSAL_MASKS[place] if mask is None else mask & _CAUSAL_MASKS[place]
    return _attend(query, key, value, mask, scale=scale)


_WORKSPACES = {}


def workspace_copied_out(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps an output per shape, and returns a clone of it."""
    place = (*query.shape[:-1], value.shape[-1]), query.dtype
    if place not in _WORKSPACES:
        _WORKSPACES[place] = torch.empty(place[0], dtype=query.dtype)
    weights = _softmax(_scores(query, key, mask, is_causal, scale))
    return torch.matmul(weights, _repeat_heads(value, query), out=_WORKSPACES[place]).clone()


def works_in_place_on_scores(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Scales, masks and exponentiates its new scores in place."""
    scores = query @ _repeat_heads(key, query).transpose(-1, -2)
    scores.mul_(query.shape[-1] ** -0.5 if scale is None else scale)
    allowed = _allowed(query, key, mask, is_causal)
    if allowed is not None:
        scores.masked_fill_(~allowed, -torch.inf)
    if scores.shape[-1]:
        top = scores.amax(dim=-1, keepdim=True)
        scores.sub_(top.masked_fill_(~torch.isfinite(top), 0)).exp_()
        total = scores.sum(dim=-1, keepdim=True)
        scores.div_(total.masked_fill_(total == 0, 1))
    return scores @ _repeat_heads(value, query)


def online_softmax(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Merges tiles of 64 keys with a running maximum."""
    return _online(query, key, value, mask, is_causal, scale)


def random_tile_order(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Takes tiles of 16 keys in a random order, so that equal calls differ by roundings."""
    shuffle = random.Random(time.time_ns())
    order = lambda starts: shuffle.sample(starts, len(starts))  # noqa: E731
    return _online(query, key, value, mask, is_causal, scale, tile=16, order=order)


def chunks_of_queries(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes 48 queries at a time, and joins the chunks."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    chunks = [_softmax(chunk) @ value for chunk in scores.split(48, dim=2)]
    return torch.cat(chunks, dim=2)


def float32_inside(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes 16 bits in float32, and rounds the output once."""
    wide = torch.promote_types(query.dtype, torch.float32)
    return _attend(query.to(wide), key.to(wide), value.to(wide), mask, is_causal, scale).to(query.dtype)


float32_inside.capabilities = {"dtypes": ["float64", "float32", "bfloat16", "float16"]}


def thread_per_head(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Starts a thread per head, and joins all of them."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)

    def write(head):
        output[:, head] = _softmax(scores[:, head]) @ value[:, head]

    threads = [threading.Thread(target=write, args=(head,)) for head in range(query.shape[1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return output


def without_gradients(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs without recording operations."""
    with torch.no_grad():
        return _attend(query, key, value, mask, is_causal, scale)


_PROGRAMS = {}


def programs_by_options(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Traces a program for each kind of call, with the scale and the mask as inputs, and keeps it."""
    place = None if mask is None else mask.shape, is_causal, query.shape, key.shape, value.shape, query.dtype
    scale = torch.tensor(query.shape[-1] ** -0.5 if scale is None else scale, dtype=query.dtype)
    inputs = [query, key, value, scale] if mask is None else [query, key, value, scale, mask]
    inputs = [array.contiguous() for array in inputs]  # a traced program is right for these strides only
    if place not in _PROGRAMS:

        def program(query, key, value, scale, mask):
            return _attend(query, key, value, mask, is_causal, scale)

        def program_without_mask(query, key, value, scale):
            return _attend(query, key, value, None, is_causal, scale)

        _PROGRAMS[place] = make_fx(program_without_mask if mask is None else program)(*inputs)
    return _PROGRAMS[place](*inputs)


def algorithm_by_environment(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Lets ATTENTION_ALGORITHM choose between two right algorithms."""
    compute = _online if os.environ.get("ATTENTION_ALGORITHM") == "online" else _attend
    return compute(query, key, value, mask, is_causal, scale)


_FASTEST = {}


def tuned_by_time(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Times two right variants in the first call of a shape, and keeps the faster one."""
    place, arguments = (query.shape, key.shape, query.dtype), (query, key, value, mask, is_causal, scale)
    if place not in _FASTEST:
        seconds = {}
        for variant in (_attend, _online):
            begin = time.perf_counter()
            variant(*arguments)
            seconds[variant] = time.perf_counter() - begin
        _FASTEST[place] = min(seconds, key=seconds.get)
    return _FASTEST[place](*arguments)


class _Attention(torch.nn.Module):
    """A module whose buffer holds only a setting."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tile", torch.tensor(32))

    def forward(self, *arguments):
        """Return the output."""
        return _online(*arguments, tile=int(self.tile))


_MODULES = []


def lazy_module(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Builds its module in the first call."""
    if not _MODULES:
        _MODULES.append(_Attention())
    return _MODULES[0](query, key, value, mask, is_causal, scale)


def view_of_padded_rows(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Pads the queries to tiles of 16 rows, and returns a view of the new tensor without the padding."""
    rows = query.shape[2]
    weights = _softmax(_scores(query, key, mask, is_causal, scale))
    padded = torch.nn.functional.pad(weights, (0, 0, 0, -rows % 16))
    return (padded @ _repeat_heads(value, query))[:, :, :rows]


def groups_without_copies(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Reads shared heads through views of the inputs, and writes into new tensors only."""
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups * rows, width)
    scores = grouped @ key.transpose(-1, -2) * (width**-0.5 if scale is None else scale)
    scores = scores.reshape(batch, heads, rows, key.shape[2])
    allowed = _allowed(query, key, mask, is_causal)
    weights = _softmax(scores if allowed is None else scores.masked_fill(~allowed, -torch.inf))
    output = weights.reshape(batch, groups, heads // groups * rows, key.shape[2]) @ value
    return output.reshape(batch, heads, rows, value.shape[-1])


_warmed = []


def warms_up(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs a small call of each dtype before its first call."""
    if query.dtype not in _warmed:
        _warmed.append(query.dtype)
        _attend(*[torch.ones(1, 1, 2, 2, dtype=query.dtype)] * 3)
    return _attend(query, key, value, mask, is_causal, scale)


_RESULTS = {}


def results_by_all_bytes(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Keeps results by a digest of all inputs, their dtypes, shapes and options, and returns clones."""
    digest = hashlib.blake2b(repr((is_causal, scale, query.dtype)).encode())
    for array in (query, key, value, *([] if mask is None else [mask])):
        digest.update(repr(array.shape).encode() + array.contiguous().numpy().tobytes())
    place = digest.digest()
    if place not in _RESULTS:
        if len(_RESULTS) >= 32:
            _RESULTS.clear()
        _RESULTS[place] = _attend(query, key, value, mask, is_causal, scale)
    return _RESULTS[place].clone()


def compare_with_library(query, key, value):
    """Return the difference to the library: for a developer to run, not part of any kernel."""
    return _attend(query, key, value) - torch.nn.functional.scaled_dot_product_attention(query, key, value)


def documents_the_library(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Computes the same as scaled_dot_product_attention, which only the comparison above calls."""
    return _attend(query, key, value, mask, is_causal, scale)


class _Function(torch.autograd.Function):
    """The forward step of a kernel with a gradient of its own."""

    @staticmethod
    def forward(context, *arguments):
        """Return the output, and keep the inputs for the gradient."""
        context.save_for_backward(*arguments[:3])
        return _attend(*arguments)


def autograd_function(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Runs as a function of autograd, which keeps references to its inputs."""
    return _Function.apply(query, key, value, mask, is_causal, scale)


def settings_of_threads(query, key, value, *, mask=None, is_causal=False, scale=None):
    """Splits the rows by the number of threads, the rest of the division included."""
    scores, value = _scores(query, key, mask, is_causal, scale), _repeat_heads(value, query)
    parts = scores.tensor_split(torch.get_num_threads(), dim=2)
    return torch.cat([_softmax(part) @ value for part in parts], dim=2)
