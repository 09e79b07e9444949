"""transformers 5.23: a mask of one's own raises for a batch without entries

`and_mask_function` is vectorised over batch, heads, queries and keys by torch.vmap. Of an axis without entries, an
index of a tensor keeps its own axis, and the four indices do not broadcast: IndexError, with `eager`, `sdpa` and
`flex_attention`. Without a function the same call returns. No thread says so; it is vmap's, as the second call shows.
"""

import torch
from transformers import LlamaConfig
from transformers.masking_utils import create_bidirectional_mask

allowed = torch.ones(0, 1, 2, 3, dtype=torch.bool)
config = LlamaConfig(hidden_size=8, num_attention_heads=2, attn_implementation="eager")
given = {"inputs_embeds": torch.zeros(0, 2, 8), "encoder_hidden_states": torch.zeros(0, 3, 8)}
try:
    own = lambda batch, head, query, key: allowed[batch, head, query, key]
    create_bidirectional_mask(config, attention_mask=None, and_mask_function=own, **given)
    errors = 0.0
except IndexError:
    errors = 1.0
print("got errors", errors, "expected", 0.0)  # got errors 1.0 expected 0.0
try:
    rows = lambda row: torch.vmap(lambda column: torch.ones(0, 3)[row, column])(torch.arange(3))
    torch.vmap(rows)(torch.arange(0))
    errors = 0.0
except IndexError:
    errors = 1.0
print("got errors", errors, "expected", 0.0)  # got errors 1.0 expected 0.0
