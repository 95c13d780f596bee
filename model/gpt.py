"""A GPT like GPT-2 and nanoGPT, which receives its attention as an argument.

    x = wte[tokens] + wpe[positions]
    x = x + proj(attend(q, k, v)),      q, k, v = c_attn(ln_1(x))          for each of n_layers
    x = x + c_proj(gelu(c_fc(ln_2(x))))
    logits = ln_f(x) wte^T

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Submodules have GPT-2's names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.dropout import DropoutKey
from attention.interface import Attention, AttentionShape
from attention.score import Layout, Range, Score, documents, take_rows, visible_pairs
from model.blocks import MLP, Attend, Block, Masks, Rotation, SelfAttention, call, labelled, rotation_table
from model.config import GPTConfig, ModelError, Positions, Recompute, check_config
from model.dropout import Mask, draw_masks, drop
from model.embedding import lookup
from model.loss import LossKind, cross_entropy
from model.score import ScoreConfig, layer_scores
from model.score_tensors import ScoreTensors

# Matrix products over the vocabulary are fastest when its rows fill whole tiles.
VOCAB_MULTIPLE = 64

# The positions of tokens (B, T): as many integers or, where all rows have the same ones, their ranges.
Places = Tensor | tuple[Range, ...]


@dataclass(frozen=True)
class Computation:
    """How a model computes. Its weights do not depend on it.

    recompute         what the backward pass recomputes
    loss              how the loss over the vocabulary is computed
    residual_in_fp32  under autocast, add the sub-layers' outputs up in fp32; else in autocast's dtype
    device, dtype     where and in which precision the model will compute, which its attention must support
    """

    recompute: Recompute = Recompute.none
    loss: LossKind = LossKind.auto
    residual_in_fp32: bool = True
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


class GPT(nn.Module):
    """The model of the recipe: tokens in, logits or loss out."""

    cos: Tensor  # (seq_len, D / 2), with rotary positions only
    sin: Tensor

    def __init__(
        self,
        config: GPTConfig,
        vocab_size: int,
        seq_len: int,
        attend: Attention,
        computation: Computation | None = None,
        *,
        score: ScoreConfig | None = None,
        documents: bool = False,
        restart_positions: bool = False,
    ) -> None:
        """Build with GPT-2's initialisation, in fp32 on the CPU: a seed gives the same weights for every device.

        vocab_size     of the tokenizer; embedding rows are padded to a multiple of 64 that stay zero
        seq_len        the longest input
        attend         the attention every layer calls
        computation    None: in fp32 on a CPU
        score          what the attention computes in each layer; None: causal attention
        documents      whether batches will have document bounds, which `attend` must then support
        restart_positions  count learned and rotary positions from the start of each document

        Raises ModelError or ScoreError for values that do not fit together, UnsupportedAttention for what `attend`
        does not support.
        """
        super().__init__()
        check_config(config)
        self.config, self.vocab_size, self.seq_len = config, vocab_size, seq_len
        self.attend, self.computation = attend, computation or Computation()
        self.restart_positions = restart_positions
        options = score or ScoreConfig()
        self.scores = layer_scores(options, config.n_layers)
        n_kv_heads = config.n_kv_heads or config.n_heads
        head_dim = config.n_embd // config.n_heads
        device, dtype = torch.device(self.computation.device), self.computation.dtype
        attend.check(
            AttentionShape(head_dim, config.n_heads, n_kv_heads, dtype, device, self.scores, documents=documents)
        )

        self.wte = nn.Embedding(-(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE, config.n_embd)
        if config.positions is Positions.learned:
            self.wpe = nn.Embedding(seq_len, config.n_embd)
        elif config.positions is Positions.rotary:
            cos, sin = rotation_table(seq_len, head_dim)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        recompute_attention = self.computation.recompute is Recompute.attention
        self.h = nn.ModuleList(Block(config, score, options, recompute_attention) for score in self.scores)
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.apply(self.initialise)

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """GPT-2's: normal with deviation 0.02, smaller for the 2 n_layers projections into the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, SelfAttention | MLP):  # visited after its children
            module.c_proj.weight.div_(math.sqrt(2 * self.config.n_layers))
        if module is self.wte:
            self.wte.weight[self.vocab_size :].zero_()

    def hidden(
        self,
        tokens: Tensor,
        dropout_key: DropoutKey | None = None,
        attend: Attention | None = None,
        document_starts: Tensor | None = None,
        rows: tuple[Range, ...] | None = None,
    ) -> Tensor:
        """The residual stream after the final norm.

        tokens           (B, T)   int64, T <= seq_len
        dropout_key      of all dropout: required in training mode if the model drops anything, unused in evaluation
        attend           another attention for this call
        document_starts  (B, T)   int32, for each token the position at which its document begins; None: one document
                         in each row
        rows             the tokens' positions in their sequences, where a rank has a part of each; document_starts is
                         then that of the whole sequences. None: 0 to T

        Returns (B, T, C). Raises ModelError.
        """
        attend = attend or self.attend
        if tokens.shape[1] > self.seq_len:
            raise ModelError(
                f"{tokens.shape[1]} tokens are more than seq_len={self.seq_len}; raise seq_len or cut them."
            )
        if not self.training:
            dropout_key = None
        elif (attend.dropout > 0 or self.config.dropout > 0) and dropout_key is None:
            raise ModelError(
                f"attention.dropout={attend.dropout} and model.dropout={self.config.dropout} need a dropout_key in "
                "training mode; pass one or call eval()."
            )

        B, T = tokens.shape
        masks: Masks = [None] * (2 * len(self.h) + 1)  # the embedding's, then two of each block
        if dropout_key is not None and self.config.dropout > 0:
            C = self.config.n_embd
            masks = draw_masks(dropout_key, self.config.dropout, len(masks), B, T, C, tokens.device, rows)
        layout = Layout()
        places: Places = rows or ((0, T),)
        if document_starts is not None:
            layout = documents(document_starts)
            if self.restart_positions:
                positions = torch.arange(document_starts.shape[1], device=tokens.device) - document_starts
                places = take_rows(positions, rows or ((0, T),), dim=1)  # (B, T)
        x, rotation = self.embed(tokens, places, mask=masks[0])
        recompute = self.computation.recompute is Recompute.block
        keys = None if dropout_key is None else dropout_key.pack_layers(len(self.h), tokens.device)
        for layer, block in enumerate(self.h):
            key = None if keys is None else keys[layer]
            site = 2 * layer + 1
            x = call(recompute, block, x, rotation, layout, attend, key, masks[site : site + 2])
        return self.ln_f(x)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        dropout_key: DropoutKey | None = None,
        attend: Attention | None = None,
        document_starts: Tensor | None = None,
        rows: tuple[Range, ...] | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab_size) or, with targets (B, T), their mean cross-entropy: a scalar in fp32.

        Targets of -100 are left out of the mean. `hidden` describes the other arguments and errors.
        """
        hidden = self.hidden(tokens, dropout_key, attend, document_starts, rows)
        if targets is None:
            return F.linear(hidden, self.wte.weight)[..., : self.vocab_size]
        with labelled("loss"):
            return cross_entropy(hidden, self.wte.weight, targets, self.vocab_size, self.computation.loss)

    def extend(
        self, tokens: Tensor, positions: Tensor, attends: Sequence[Attend], layout: Layout, rotation: Rotation | None
    ) -> Tensor:
        """The residual stream after the final norm, for tokens that continue sequences.

        tokens     (B, T)   int64
        positions  (B, T)   integers, each token's place in its sequence
        attends    what each layer calls for attention, which knows the tokens before these
        layout     for them
        rotation   with rotary positions, the angles of all positions up to the highest (model.blocks.rotation_table)

        Drops nothing, and never reads values on the host. Returns (B, T, C).
        """
        x, rotation = self.embed(tokens, positions, rotation)
        return self.ln_f(self.through_blocks(x, rotation, attends, layout))

    def embed(
        self, tokens: Tensor, places: Places, rotation: Rotation | None = None, mask: Mask | None = None
    ) -> tuple[Tensor, Rotation | None]:
        """The residual stream (B, T, C) before the first block and, with rotary positions, their angles.

        rotation  with rotary positions, the angles of all of them; None: those up to seq_len
        mask      of dropout
        """
        x, angles = lookup(self.wte.weight, tokens), None
        if self.config.positions is Positions.learned:
            x = x + rows_at(self.wpe.weight, places)
        elif self.config.positions is Positions.rotary:
            cos, sin = rotation or (self.cos, self.sin)
            angles = rows_at(cos, places), rows_at(sin, places)
        return self.narrowed(drop(x, mask)), angles

    def through_blocks(self, x: Tensor, rotation: Rotation | None, attends: Sequence[Attend], layout: Layout) -> Tensor:
        """The residual stream (B, T, C) after the last block, from what `embed` returns; see `extend`."""
        for block, attend in zip(self.h, attends, strict=True):
            x = block(x, rotation, layout, attend, None, (None, None))
        return x

    def narrowed(self, x: Tensor) -> Tensor:
        """The residual stream x in the precision in which it is accumulated."""
        narrow = not self.computation.residual_in_fp32 and torch.is_autocast_enabled(x.device.type)
        return x.to(torch.get_autocast_dtype(x.device.type)) if narrow else x

    def made_tensors(self) -> list[str]:
        """The names of the tensors that layers make from their input for their scores."""
        return [name for module in self.modules() if isinstance(module, ScoreTensors) for name in module.made]

    def num_parameters(self) -> int:
        """Number of trained values; the tied embedding counts once, without its padding."""
        padding = self.wte.num_embeddings - self.vocab_size
        return sum(p.numel() for p in self.parameters()) - padding * self.config.n_embd

    def flops_per_token(self, seq_len: int, causal: bool, pieces: Sequence[int] | None = None) -> float:
        """Floating-point operations of training on one token, forward and backward.

            6 N + 12 L C T         causal: 6 N + 6 L C T         with a window w: 6 N + 12 L C (w - w^2 / 2 T)

        N is the number of parameters that enter matrix products: linear layers and the vocabulary's head, not
        the lookup of tokens and positions, biases or norms. Each is one multiplication and one addition in the
        forward and twice that in the backward pass. Attention's two products take 4 C T per layer and token in the
        forward (scores over T keys, and their sum of values), and twice that backward: 12 L C T. A causal query
        sees half of the keys on average. (PaLM, Chowdhery et al. 2022, appendix B.) Recomputation is not counted.

        causal  count the keys that each layer's score leaves visible; else all of them
        pieces  lengths of the documents that rows of seq_len tokens are cut into; None: one document a row
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        N = matrices + self.vocab_size * self.config.n_embd
        scores = self.scores if causal else (Score(causal=False),) * self.config.n_layers
        pieces = pieces if causal and pieces else [seq_len]
        keys_per_query = sum(visible_pairs(score, n) for score in scores for n in pieces) / max(sum(pieces), 1)
        return 6 * N + 12 * self.config.n_embd * keys_per_query


def rows_at(table: Tensor, places: Places) -> Tensor:
    """The rows of table (N, C) for the tokens at `places`: (B, T, C), or (T, C) where all rows have the same ones."""
    return lookup(table, places) if isinstance(places, Tensor) else take_rows(table, places, dim=0)
