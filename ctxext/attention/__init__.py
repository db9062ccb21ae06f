"""In-attention RoPE: for methods that config.json cannot express, queries and keys are rotated inside attention.

The rotary embedding returns the identity rotation, so keys come to the cache before RoPE; an attention function
registered with transformers rotates queries and keys, the latter in the cache where it can, then calls the model's own
attention function.

`rotary.py` replaces the rotary embedding and holds the frequencies; `call.py` is one forward pass; `keys.py` has cache
layers that know the positions of their keys and how they are rotated; `masks.py` builds masks block by block;
`tiles.py` splits attention into rectangles and triangles that need no mask; `softmax.py` computes and joins them, or
runs one softmax over a block; `proof.py` detects how a family rotates.
"""
