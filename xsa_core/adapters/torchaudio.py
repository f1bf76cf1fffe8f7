"""torchaudio: the encoders of wav2vec 2.0, HuBERT and WavLM.

Its Conformer uses `torch.nn.MultiheadAttention` and is converted with it.

    B batch   T frames   H heads   D channels of a head   C channels
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xsa_core.adapters.layer import ConvertedLayer, TableAdapter, hidden


class EncoderLayer(ConvertedLayer):
    """`models.wav2vec2.components.SelfAttention`."""

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def exclusive_forward(
        self: Any,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """`B T C` -> `B T C`; the last two arguments are WavLM's and not used, as in the library."""
        expected = (x.shape[0], 1, x.shape[1], x.shape[1]) if x.dim() == 3 else None
        if expected is None or x.shape[2] != self.embed_dim:
            raise ValueError(f"expected (batch, frames, {self.embed_dim}), got {tuple(x.shape)}")
        if attention_mask is not None and tuple(attention_mask.shape) != expected:
            raise ValueError(f"expected an attention mask {expected}, got {tuple(attention_mask.shape)}")
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(self.attend(q, k, v, bias=attention_mask, dropout_p=self.dropout)), None


class WavlmLayer(ConvertedLayer):
    """`models.wav2vec2.wavlm_attention.WavLMSelfAttention`: gated relative positions.

    It holds a `MultiheadAttention` for its weights and never calls it.
    """

    @staticmethod
    def sizes(module: Any) -> tuple[int, int]:
        """See the base."""
        return module.num_heads, module.head_dim

    def exclusive_forward(
        self: Any,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`B T C` -> `B T C` and the position bias `B H T T` for the layers that follow."""
        if attention_mask is not None:
            raise ValueError("WavLM takes key_padding_mask (batch, frames), not an attention mask")
        B, T, _ = query.shape
        if self.rel_attn_embed is not None and position_bias is None:
            position_bias = self.compute_bias(T, T).unsqueeze(0).repeat(B, 1, 1, 1)
        bias = None if position_bias is None else self.gated(query, position_bias.view(B, -1, T, T))
        if bias is not None and key_padding_mask is not None:
            # Without positions the library ignores the padding mask, and so does this.
            bias = bias + hidden(key_padding_mask, bias.dtype)[:, None, None, :]
        packed = self.attention
        qkv = torch.nn.functional.linear(query, packed.in_proj_weight, packed.in_proj_bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = self.attend(q, k, v, bias=bias, dropout_p=self.dropout)
        return packed.out_proj(heads), position_bias

    def gated(self: Any, query: Tensor, position_bias: Tensor) -> Tensor:
        """The bias `B H T T` times a gate per head and query, which the query's own channels give."""
        if not self.gru_rel_pos:
            return position_bias
        own = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # B H T D
        gates = self.gru_rel_pos_linear(own).unflatten(-1, (2, 4)).sum(dim=-1)
        reset, update = torch.sigmoid(gates).chunk(2, dim=-1)  # B H T 1
        return (reset * (update * self.gru_rel_pos_const - 1.0) + 2.0) * position_bias


ADAPTER = TableAdapter(
    "torchaudio",
    layers={
        "torchaudio.models.wav2vec2.components.SelfAttention": (EncoderLayer, "wav2vec2_base, hubert_base"),
        "torchaudio.models.wav2vec2.wavlm_attention.WavLMSelfAttention": (WavlmLayer, "wavlm_base"),
    },
    others={
        "torchaudio.models.emformer._EmformerAttention": (
            "unsupported",
            "streaming blocks with summaries and memories: queries and keys are of different kinds",
        ),
        "torchaudio.models.tacotron2._Attention": ("cross", "the decoder asks the text"),
        "torchaudio.models._hdemucs._LocalState": (
            "unsupported",
            "local attention of a convolutional network, which never attends the own frame",
        ),
    },
)
