"""In-attention RoPE: for methods that config.json cannot express, queries and keys are rotated inside attention.

The rotary embedding returns the identity rotation, so the cache holds pre-RoPE keys; an attention function registered
with transformers rotates queries and keys when it uses them, then calls the model's own attention function.

`rotary.py` replaces the rotary embedding and holds the frequencies; `call.py` is one forward pass; `keys.py` has cache
layers that store the positions of their keys; `masks.py` builds masks block by block; `tiles.py` splits attention into
rectangles and triangles that need no mask; `softmax.py` computes and joins them, or runs one softmax over a block;
`proof.py` detects how a family rotates.
"""
