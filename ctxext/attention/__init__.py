"""In-attention RoPE: for methods that config.json cannot express, queries and keys are rotated inside attention.

The rotary embedding returns the identity rotation, so the cache holds pre-RoPE keys; an attention function registered
with transformers rotates queries and keys when it uses them, then calls the model's own attention function.

`rotary.py` replaces the rotary embedding and holds the frequencies; `call.py` is one forward pass; `keys.py` has cache
layers that store the positions of their keys; `masks.py` builds masks block by block; `softmax.py` is exact attention
in blocks, for methods with pair-dependent rotations; `proof.py` detects how a family rotates.
"""
