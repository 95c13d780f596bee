"""Attention for generation: a few new queries of each sequence against a cache of keys and values.

cache.py     Cache, contiguous or paged, and how new keys and values enter it: start reading here
write.py     writes new tokens to their slots, in torch; write_kernel.py: in Triton

../tiled.py attends to a cache in plain PyTorch; ../flash/decode.py in Triton, by flash-decoding.
"""
