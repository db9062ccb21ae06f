"""In-attention RoPE: for what a config cannot say, positions reach queries and keys inside attention.

The rotary embedding gives the identity, so that the cache holds unrotated keys; an attention function
registered with transformers rotates queries and keys when it uses them, and calls the model's own.

`rotary.py` holds the numbers and stands instead of the rotary embedding; `call.py` is one forward pass;
`keys.py` the cache layers that know the positions of their keys; `masks.py` masks that are made block by block;
`softmax.py` exact attention in blocks, for methods that rotate one pair of tokens so and another so;
`proof.py` finds how a family rotates, by looking.
"""
