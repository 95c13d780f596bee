"""A GPT, which receives its attention as an argument. By default it is GPT-2, with nanoGPT's options:

    x = wte[tokens] + wpe[positions]
    x = x + attention(ln_1(x))             for each of n_layers: model/blocks.py, model/attention.py
    x = x + mlp(ln_2(x))                   model/mlps.py
    logits = ln_f(x) wte^T

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Submodules have GPT-2's names. Every other
choice of model/options.py changes one of these lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention.dropout import DropoutKey
from attention.interface import Attention, AttentionShape
from attention.layout import Layout, documents
from attention.score import Range, take_rows
from model.attention import Attend, MixerLayer, SelfAttention, labelled
from model.blocks import Block, Embedded, Masks, Pass, Stream, call
from model.dropout import Mask, draw_masks, drop
from model.embedding import lookup
from model.further import Further, FurtherToken
from model.fused_norm import can_fuse_stream
from model.linear import Linear
from model.loss import LossKind, capped, cross_entropy
from model.mistakes import check_config, check_mixers
from model.mlps import MLP
from model.norms import build_norm
from model.options import GPTConfig, ModelError, Positions, Recompute
from model.positions import Places, PositionTables, position_tables, rows_at
from model.score import ScoreConfig, attention_scores, layer_scores
from model.score_tensors import ScoreTensors

# Matrix products over the vocabulary are fastest when its rows fill whole tiles.
VOCAB_MULTIPLE = 64
S = TypeVar("S", Tensor, Tensor | Stream)


@dataclass(frozen=True)
class Computation:
    """How a model computes. Its weights do not depend on it.

    recompute         the part that the backward pass recomputes
    loss              how the loss over the vocabulary is computed
    residual_in_fp32  under autocast, add the sub-layers' outputs up in fp32; else in autocast's dtype
    device, dtype     where and in which precision the model will compute, which its attention must support
    """

    recompute: Recompute = Recompute.none
    loss: LossKind = LossKind.auto
    residual_in_fp32: bool = True
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32


def vocabulary(config: GPTConfig, tokens: int) -> int:
    """The number of logits, for a tokenizer with so many tokens. Raises ModelError where it has more."""
    if config.vocab_size is not None and config.vocab_size < tokens:
        raise ModelError(
            f"model.vocab_size={config.vocab_size} is fewer than the tokenizer's {tokens} tokens; raise it, or use "
            "model.vocab_size=null."
        )
    return config.vocab_size or tokens


class GPT(nn.Module):
    """The model of the recipe: tokens in, logits or loss out."""

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
        score          of the attention in each layer; None: causal attention
        documents      whether batches will have document bounds, which `attend` must then support
        restart_positions  count positions from the start of each document

        Raises ModelError or ScoreError for values that do not fit together, UnsupportedAttention for what `attend`
        does not support.
        """
        super().__init__()
        check_config(config)
        self.config, self.computation = config, computation or Computation()
        self.vocab_size = vocabulary(config, vocab_size)
        self.seq_len, self.restart_positions = seq_len, restart_positions
        self.options = score or ScoreConfig()
        self.scores = attention_scores(self.options, config)
        self.attend = attend
        device, heads = torch.device(self.computation.device), (config.head_size, config.n_heads, config.kv_heads)
        self.shape = AttentionShape(*heads, self.computation.dtype, device, self.scores, documents)
        self.check_attention()

        # In the order of the random numbers that draw their weights.
        rows = -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = nn.Embedding(rows, config.n_embd)
        if config.positions is Positions.learned:
            self.wpe = nn.Embedding(seq_len, config.n_embd)
        for name in PositionTables._fields:
            self.register_buffer(name, None, persistent=False)
        self.tables = position_tables(config, seq_len)
        recomputes = self.computation.recompute is Recompute.attention
        self.h = nn.ModuleList(
            Block(config, score, self.options, layer, recomputes)
            for layer, score in enumerate(layer_scores(self.options, config.n_layers))
        )
        self.ln_f = build_norm(config)
        self.lm_head = None if config.tied else Linear(config.n_embd, rows, bias=False)
        self.value_embeddings = nn.ModuleList(
            nn.Embedding(rows, config.kv_heads * config.head_size) for _ in range(config.value_embeddings)
        )
        self.embed_norm = build_norm(config, config.embed_norm)
        self.further = self.second_head() if config.mtp else None
        self.apply(self.initialise)

    def check_attention(self) -> None:
        """Raise UnsupportedAttention or ModelError for what the model's attention does not support."""
        attend = self.attend
        attend.check(self.shape)
        check_mixers(self.config, self.shape.device)
        if self.computation.recompute is Recompute.around_attention and not attend.operators:
            raise ModelError(
                "training.recompute=around_attention keeps what the attention's operators give, and "
                f"attention={attend.name} names none; use training.recompute=block, or attention=flash or sdpa (whose "
                "attention.backend=math has none)."
            )

    def second_head(self) -> FurtherToken:
        """A head that predicts the token after the next."""
        recomputes = self.computation.recompute is Recompute.attention
        return FurtherToken(self.config, self.scores[-1], self.options, recomputes)

    @torch.no_grad()
    def initialise(self, module: nn.Module) -> None:
        """GPT-2's: normal with deviation 0.02, smaller for the 2 n_layers projections into the residual stream.

        Value embeddings are as large as the values that layers compute from a normalised stream.
        """
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, SelfAttention | MLP):  # visited after its children
            module.c_proj.weight.div_(math.sqrt(2 * self.config.n_layers))
        if isinstance(module, MixerLayer):
            module.mixer.o_proj.weight.div_(math.sqrt(2 * self.config.n_layers))
        if module is self:
            for table in self.value_tables:
                table.mul_(math.sqrt(self.config.n_embd))
            for table in (self.wte.weight, self.head):
                table[self.vocab_size :].zero_()

    def materialise(self, device: torch.device | str) -> None:
        """Move from the meta device to another, where the parameters wait to be loaded, except a second head's."""
        self.to_empty(device=device)
        self.tables = position_tables(self.config, self.seq_len).to(torch.device(device))
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.fill_fixed_tensors()
        if self.further is not None:
            self.further = self.second_head().to(device)
            self.further.apply(self.initialise)

    @property
    def head(self) -> Tensor:
        """The matrix (V, C) from the stream to logits, its rows padded."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    @property
    def value_tables(self) -> list[Tensor]:
        """The value embeddings (V, H_kv D), their rows padded."""
        return list(self.value_embeddings.parameters())

    @property
    def tables(self) -> PositionTables:
        """The tables for positions 0 to seq_len - 1."""
        return PositionTables(*(getattr(self, name) for name in PositionTables._fields))

    @tables.setter
    def tables(self, tables: PositionTables) -> None:
        for name, table in tables._asdict().items():
            setattr(self, name, table)

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
        rows             the tokens' positions in their sequences, where a rank has a part of each; document_starts then
                         covers the whole sequences. None: 0 to T

        Returns (B, T, C). Raises ModelError.
        """
        return self.ln_f(self.through_blocks(self.prepare(tokens, dropout_key, attend, document_starts, rows))[0])

    def prepare(
        self,
        tokens: Tensor,
        dropout_key: DropoutKey | None,
        attend: Attention | None,
        document_starts: Tensor | None,
        rows: tuple[Range, ...] | None,
    ) -> Pass:
        """The inputs of the blocks; `hidden` describes arguments and errors."""
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
        blocks = len(self.h) + (self.further is not None)
        masks: Masks = [None] * (2 * blocks + 1)  # the embedding's, then two of each block
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
        keys = None if dropout_key is None else dropout_key.pack_layers(blocks, tokens.device)
        return Pass(self.embed(tokens, places, mask=masks[0]), [attend] * blocks, layout, keys, masks[1:])

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        dropout_key: DropoutKey | None = None,
        attend: Attention | None = None,
        document_starts: Tensor | None = None,
        rows: tuple[Range, ...] | None = None,
        further: Further | None = None,
        count: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, vocab_size) or, with targets (B, T), their mean cross-entropy: a scalar in fp32.

        Targets of -100 are left out of the mean; `count`, 0-dim, divides the sum instead of the number of the others.
        With `further` the result is (2,): that loss, and the second head's.
        `hidden` describes the other arguments and errors.
        """
        inputs = self.prepare(tokens, dropout_key, attend, document_starts, rows)
        x, first = self.through_blocks(inputs)
        hidden = self.ln_f(x)
        if targets is None:
            return self.logits(hidden)
        loss = self.loss(hidden, targets, count)
        if further is None or self.further is None:
            return loss
        last = len(self.h)
        hidden = self.further(
            x, self.embedding(further.tokens), lambda block, x: self.through(block, x, inputs, last, first)[0]
        )
        return torch.stack([loss, self.loss(hidden, further.targets, further.known)])

    def loss(self, hidden: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """The mean cross-entropy of targets (B, T) for hidden (B, T, C) after a final norm; see `cross_entropy`."""
        kind, cap = self.computation.loss, self.config.logit_cap
        with labelled("loss"):
            return cross_entropy(hidden, self.head, targets, self.vocab_size, kind, cap=cap, count=count)

    def objective(self, losses: Tensor) -> Tensor:
        """The loss that training minimises, from the losses that `forward` returns for targets."""
        return losses if losses.ndim == 0 else losses[0] + self.config.mtp * losses[1]

    def logits(self, hidden: Tensor, head: Tensor | None = None) -> Tensor:
        """(..., vocab_size) for hidden (..., C) after the final norm.

        head  a copy of the model's in another precision; None: the model's
        """
        x = F.linear(hidden, self.head if head is None else head)[..., : self.vocab_size]
        return capped(x, self.config.logit_cap)

    def extend(
        self,
        tokens: Tensor,
        positions: Tensor,
        attends: Sequence[Attend],
        layout: Layout,
        tables: PositionTables | None,
    ) -> Tensor:
        """The residual stream after the final norm, for tokens that continue sequences.

        tokens     (B, T)   int64
        positions  (B, T)   integers, each token's place in its sequence
        attends    the attention that each layer calls, which knows the tokens before these
        layout     for them
        tables     with a row for each position up to the highest (model.positions); None: up to seq_len

        Drops nothing, and never reads values on the host. Returns (B, T, C).
        """
        return self.ln_f(self.through_blocks(Pass(self.embed(tokens, positions, tables), attends, layout))[0])

    def embed(
        self, tokens: Tensor, places: Places, tables: PositionTables | None = None, mask: Mask | None = None
    ) -> Embedded:
        """The input of the first block.

        tables  with a row for each position; None: those up to seq_len
        mask    of dropout
        """
        x = self.embedding(tokens)
        if self.config.positions is Positions.learned:
            x = x + rows_at(self.wpe.weight, places)
        values = tuple(lookup(table, tokens) for table in self.value_tables)
        rows = (tables or self.tables).at(places)
        x = drop(self.embed_norm(x), mask)
        if not self.computation.residual_in_fp32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # in which the residual stream is accumulated
        return Embedded(x, rows, values)

    def embedding(self, tokens: Tensor) -> Tensor:
        """The embedding (B, T, C) of tokens (B, T)."""
        x = lookup(self.wte.weight, tokens)
        return x * math.sqrt(self.config.n_embd) if self.config.embed_scale else x

    def through_blocks(self, inputs: Pass) -> tuple[Tensor, Tensor | None]:
        """The residual stream (B, T, C) after the last block and, with value_residual, the first layer's values."""
        # What a recomputed block reads is stored, and should be a single tensor.
        separate = self.computation.recompute is Recompute.none and can_fuse_stream(inputs.embedded.x)
        x: Tensor | Stream = Stream(inputs.embedded.x) if separate else inputs.embedded.x
        first = None
        for layer, block in enumerate(self.h):
            x, values = self.through(block, x, inputs, layer, first)
            first = values if layer == 0 else first
        return x.added() if isinstance(x, Stream) else x, first

    def through(
        self, block: nn.Module, x: S, inputs: Pass, layer: int, first: Tensor | None
    ) -> tuple[S, Tensor | None]:
        """The residual stream after a block, and its values, from the stream x and the first layer's values."""
        kind = self.computation.recompute
        return call(
            kind in (Recompute.block, Recompute.around_attention) and torch.is_grad_enabled(),
            block,
            x,
            inputs.around(layer, self.config, first),
            (None, None) if inputs.masks is None else inputs.masks[2 * layer : 2 * layer + 2],
            saved=self.attend.operators if kind is Recompute.around_attention else frozenset(),
        )

    def made_tensors(self) -> list[str]:
        """The names of the tensors that layers make from their input for their scores."""
        return [name for module in self.modules() if isinstance(module, ScoreTensors) for name in module.made]
