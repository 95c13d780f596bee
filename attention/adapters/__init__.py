"""Attention by other libraries, and this library's attention for theirs.

sdpa.py, flex.py, peers.py     implementations: torch's, and those of other packages; trial.py calls one once
varlen.py                      rows cut into documents, called as varlen kernels are
torch_sdpa.py, transformers.py what torch and transformers call, computed by an implementation of this library
"""
