"""Config sections of the text task."""

from typing import Literal

from pydantic import Field, model_validator

from tasks.config import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Section


class TextModelConfig(Section):
    """The decoder: nanoGPT's with RoPE and a LayerNorm after the embedding (paper, section 4)."""

    n_layers: PositiveInt
    d_model: PositiveInt
    n_heads: PositiveInt
    head_dim: PositiveInt | None = Field(None, description="size of a head; null: d_model / n_heads")
    n_kv_heads: PositiveInt | None = Field(None, description="grouped-query attention; null: n_heads")
    mlp_ratio: PositiveFloat = Field(4.0, description="hidden width of the MLP over d_model")
    rope_base: PositiveFloat = 10000.0
    bias: bool = False
    qk_norm: bool = False
    n_sinks: NonNegativeInt = Field(0, description="learned sinks every query may attend (paper, Figure 6)")
    tie_embeddings: bool = True
    post_embedding_norm: bool = True
    dropout: Fraction = 0.0


class TextDataConfig(Section):
    """Where the text comes from and how long a sample is."""

    source: Literal["embedded", "file", "shards"] = "embedded"
    path: str | None = Field(None, description="source=file: a UTF-8 text file; shards: a directory")
    tokenizer: Literal["gpt2", "bytes"] | None = Field(
        None, description="of shards that no manifest describes (those of ./xsa data prepare have one)"
    )
    headerless: bool = Field(False, description="shards are nanoGPT's: tokens alone, no header")
    seq_len: PositiveInt = Field(description="tokens of a sample")
    validation_fraction: Fraction = Field(0.1, description="of a file: its last part is held out")

    @model_validator(mode="after")
    def _path_fits(self) -> "TextDataConfig":
        if self.source == "file" and not self.path:
            raise ValueError("data.path: no value; set it to a UTF-8 text file, data.path=FILE")
        if self.source == "shards" and not self.path:
            raise ValueError("data.path: no value; set it to a directory of shards, data.path=DIR")
        if self.source == "embedded" and self.path:
            raise ValueError("data.path: given, but data.source is embedded; add data.source=file")
        if self.source != "shards" and (self.tokenizer or self.headerless):
            raise ValueError(
                f"data.tokenizer, data.headerless: of shards, data.source is {self.source}; leave them out"
            )
        return self
