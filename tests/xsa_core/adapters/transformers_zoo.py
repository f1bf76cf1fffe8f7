"""Tiny models of transformers, one per family, with random weights: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 53


@dataclass(frozen=True)
class Family:
    """One row of the zoo.

    Attributes:
        model: class. config: class. sizes: what makes it tiny.
        kind: "decoder", "encoder" (of text), "image", "audio" or "seq2seq".
        layers: self attention layers that are converted. cross: attention modules that stay as they are.
        implementation: of attention, where the default does not do.
        nested: config of a part -> what makes it tiny.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    kind: str
    layers: int = 2
    cross: int = 0
    implementation: str | None = None
    nested: dict[str, dict[str, Any]] = field(default_factory=dict)


_WIDE = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_LM = {**_WIDE, "vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0}
_IDS = {"bos_token_id": 1, "eos_token_id": None}
_GQA = {**_LM, **_IDS, "num_key_value_heads": 2, "head_dim": 8}
# A norm follows attention here. The first token sees only itself, so its exclusive output is rounding and
# nothing else; the usual epsilon would make that as large as everything else.
_NORMED = {**_GQA, "sliding_window": 4, "query_pre_attn_scalar": 8, "rms_norm_eps": 1e-2}
_BERT = {**_LM}
_SEQ = {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64, "pad_token_id": 0}
_BART = {
    **_SEQ,
    **_IDS,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_SPEECH = {
    **_WIDE,
    "vocab_size": VOCAB,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
_IMAGE = {**_WIDE, "image_size": 16, "patch_size": 4}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **_IDS},
        "decoder",
    ),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _GQA, "decoder"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", {**_LM, **_IDS, "num_key_value_heads": 2}, "decoder"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", _GQA, "decoder"),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_LM, **_IDS}, "decoder"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GQA, "sliding_window": 4}, "decoder"),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_NORMED, "attn_logit_softcapping": 2.0},
        "decoder",
        implementation="eager",
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _NORMED,
        "decoder",
    ),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {**_LM, **_IDS, "num_key_value_heads": 2}, "decoder"),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {**_LM, **_IDS, "ffn_dim": 40, "word_embed_proj_dim": 32},
        "decoder",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_GQA, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
        "decoder",
        implementation="eager",
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GQA, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
        "decoder",
    ),
    # It caches latents, and here their rotary part is as wide as a value: shapes do not tell them apart.
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LM,
            **_IDS,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "decoder",
    ),
    "bert": Family("BertModel", "BertConfig", _BERT, "encoder"),
    "roberta": Family("RobertaModel", "RobertaConfig", {**_BERT, "max_position_embeddings": 70}, "encoder"),
    "distilbert": Family(
        "DistilBertModel",
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": 32,
            "hidden_dim": 40,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
        "encoder",
    ),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {**_LM, "local_attention": 4, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
        | {"cls_token_id": 3, "sep_token_id": 4},
        "encoder",
    ),
    "electra": Family("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 16}, "encoder"),
    "vit": Family("ViTModel", "ViTConfig", _IMAGE, "image"),
    "deit": Family("DeiTModel", "DeiTConfig", _IMAGE, "image"),
    "dinov2": Family("Dinov2Model", "Dinov2Config", _IMAGE, "image"),
    "siglip": Family(
        "SiglipVisionModel", "SiglipVisionConfig", {**_IMAGE, "vision_use_head": False}, "image"
    ),
    "clip": Family("CLIPVisionModel", "CLIPVisionConfig", _IMAGE, "image"),
    "wav2vec2": Family("Wav2Vec2Model", "Wav2Vec2Config", _SPEECH, "audio"),
    "hubert": Family("HubertModel", "HubertConfig", _SPEECH, "audio"),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 40,
            "num_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
        },
        "seq2seq",
        layers=4,
        cross=2,
    ),
    "bart": Family("BartForConditionalGeneration", "BartConfig", _BART, "seq2seq", layers=4, cross=2),
    "marian": Family(
        "MarianMTModel", "MarianConfig", {**_BART, "eos_token_id": 2}, "seq2seq", layers=4, cross=2
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **{k: v for k, v in _BART.items() if k != "max_position_embeddings"},
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 64,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        "seq2seq",
        layers=4,
        cross=2,
    ),
}

DECODERS = [name for name, family in FAMILIES.items() if family.kind == "decoder"]


def build(name: str, **changes: Any) -> Any:
    """A model of a family, in evaluation mode, the same every time."""
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**family.sizes, **changes})
    torch.manual_seed(0)
    kwargs = {} if family.implementation is None else {"attn_implementation": family.implementation}
    model = getattr(transformers, family.model)._from_config(config, **kwargs)
    for parameter in model.parameters():  # the library's own start leaves attention nearly uniform
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def inputs(name: str, batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Keyword arguments for a forward of the family."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (batch, length), generator=generator)
    if family.kind in ("decoder", "encoder"):
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=generator)}
    if family.kind == "audio":
        return {"input_values": torch.randn(batch, 400, generator=generator)}
    if name == "whisper":
        return {
            "input_features": torch.randn(batch, 8, 24, generator=generator),
            "decoder_input_ids": ids,
        }
    source = torch.randint(5, VOCAB, (batch, length + 2), generator=generator)
    return {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": ids}


def output(model: Any, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits, or the last hidden states."""
    result = model(**arguments)
    return result["logits"] if "logits" in result else result["last_hidden_state"]
