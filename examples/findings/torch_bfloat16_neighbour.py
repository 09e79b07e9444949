"""torch 2.13: NaN in a row of a bfloat16 product reaches the row before it

On processors with AMX, oneDNN's product in bfloat16 reads the last elements of a row in pairs. Where the inner axis
is odd, the second of a pair is the first element of the next row, which is multiplied by a zero: an infinity or a NaN
there makes the whole row before it NaN. So one bad query spoils its neighbour's scores, and a bad token that no one
attends to spoils the output of another. `attncheck search torch` found it; it was reported in July 2026
(uxlfoundation/oneDNN#5717) and is fixed in oneDNN (uxlfoundation/oneDNN#5723), but not in the one that this release
holds.
"""

# on a processor with amx_bf16
import torch
import numpy as np

query, key = torch.zeros(82, 3, dtype=torch.bfloat16), torch.zeros(3, 95, dtype=torch.bfloat16)
query[3, 0] = np.inf
spoilt = (query @ key).isnan().any(1)  # rows of scores
print("row 2 is NaN: got", float(spoilt[2]), "expected", 0.0)  # row 2 is NaN: got 1.0 expected 0.0
