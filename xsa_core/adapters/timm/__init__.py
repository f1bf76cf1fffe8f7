"""timm: every attention class of its Vision Transformers, and those of the networks around them."""

from __future__ import annotations

from xsa_core.adapters.layer import TableAdapter
from xsa_core.adapters.timm import maps, mixed, tokens

_LAYERS = {
    "layers.attention.Attention": (tokens.PlainLayer, "vit_tiny_patch16_224"),
    "layers.attention.AttentionRope": (tokens.RotaryLayer, "vit_small_patch16_rope_224"),
    "layers.diff_attention.DiffAttention": (tokens.DifferentialLayer, "vit_dlittle_patch16_reg1_gap_256"),
    "layers.attention2d.Attention2d": (maps.Attention2dLayer, "the class alone"),
    "layers.attention2d.MultiQueryAttention2d": (maps.MultiQueryLayer, "mobilenetv4_hybrid_medium"),
    "layers.bottleneck_attn.BottleneckAttn": (maps.BottleneckLayer, "botnet26t_256"),
    "models.beit.Attention": (tokens.BeitLayer, "beit_base_patch16_224"),
    "models.cait.TalkingHeadAttn": (mixed.TalkingLayer, "cait_xxs24_224"),
    "models.convit.GPSA": (mixed.GatedPositionLayer, "convit_tiny"),
    "models.convit.MHSA": (tokens.SimpleLayer, "convit_tiny"),
    "models.cpubone.ConvAttention": (maps.StridedMapLayer, "cpubone_nano"),
    "models.davit.WindowAttention": (tokens.DavitLayer, "davit_tiny"),
    "models.efficientformer.Attention": (tokens.RatioLayer, "efficientformer_l1"),
    "models.efficientformer_v2.Attention2d": (mixed.TalkingMapLayer, "efficientformerv2_s0"),
    "models.efficientvit_msra.CascadedGroupAttention": (maps.CascadedLayer, "efficientvit_m0"),
    "models.eva.EvaAttention": (tokens.EvaLayer, "eva02_tiny_patch14_224"),
    "models.fastvit.Attention": (maps.FastvitLayer, "fastvit_sa12"),
    "models.gcvit.WindowAttentionGlobal": (tokens.GcvitLayer, "gcvit_xxtiny"),
    "models.gemma4_vit.Gemma4Attention": (tokens.Gemma4Layer, "the class alone"),
    "models.hiera.MaskUnitAttention": (maps.HieraLayer, "hiera_tiny_224"),
    "models.hieradet_sam2.MultiScaleAttention": (maps.HieradetLayer, "hieradet_small"),
    "models.iformer.SHMA": (maps.ModulationLayer, "iformer_t"),
    "models.levit.Attention": (maps.LevitLayer, "levit_128s"),
    "models.lowformer.ConvAttention": (maps.StridedMapLayer, "lowformer_b0"),
    "models.maxxvit.Attention2d": (maps.MaxxvitLayer, "coatnet_0_rw_224"),
    "models.maxxvit.AttentionCl": (maps.MaxxvitLastLayer, "maxvit_rmlp_pico_rw_256"),
    "models.metaformer.Attention": (tokens.SimpleLayer, "caformer_s18"),
    "models.nest.Attention": (maps.NestLayer, "nest_tiny"),
    "models.nextvit.EfficientAttention": (maps.UnpooledLayer, "nextvit_small"),
    "models.pvt_v2.Attention": (maps.PvtLayer, "pvt_v2_b0"),
    "models.shvit.SHSA": (maps.SingleHeadLayer, "shvit_s1"),
    "models.swin_transformer.WindowAttention": (tokens.SwinLayer, "swin_tiny_patch4_window7_224"),
    "models.swin_transformer_v2.WindowAttention": (tokens.SwinV2Layer, "swinv2_tiny_window8_256"),
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention": (tokens.SwinV2CrLayer, "swinv2_cr_tiny_224"),
    "models.tiny_vit.Attention": (tokens.RatioLayer, "tiny_vit_5m_224"),
    "models.tnt.Attention": (tokens.TntLayer, "tnt_s_legacy_patch16_224"),
    "models.twins.GlobalSubSampleAttn": (maps.UnpooledLayer, "twins_svt_small"),
    "models.twins.LocallyGroupedAttn": (maps.TwinsLocalLayer, "twins_svt_small"),
    "models.vision_transformer.ParallelScalingBlock": (tokens.ParallelLayer, "the class alone"),
    "models.vision_transformer.DiffParallelScalingBlock": (
        tokens.DifferentialParallelLayer,
        "the class alone",
    ),
    "models.vision_transformer_relpos.RelPosAttention": (
        tokens.RelativeLayer,
        "vit_relpos_small_patch16_224",
    ),
    "models.vision_transformer_sam.Attention": (maps.SamLayer, "samvit_base_patch16"),
    "models.visformer.Attention": (maps.MapLayer, "visformer_tiny"),
    "models.volo.Attention": (maps.VoloLayer, "volo_d1_224"),
}

_OTHERS = {
    # Pooling and class tokens.
    "layers.attention_pool.AttentionPoolLatent": ("pooling", ""),
    "layers.attention_pool.AttentionPoolPrr": ("pooling", ""),
    "layers.attention_pool2d.AttentionPool2d": ("pooling", ""),
    "layers.attention_pool2d.RotAttentionPool2d": ("pooling", ""),
    "layers.ml_decoder.MLDecoder": ("cross", ""),
    "models.cait.ClassAttn": ("class", ""),
    "models.crossvit.CrossAttention": ("class", "the class token of one branch asks the tokens of the other"),
    "models.volo.ClassAttention": ("class", ""),
    # Keys, values or queries that stand for several tokens.
    "layers.attention2d.MultiQueryAttentionV2": ("subsampled", ""),
    "layers.halo_attn.HaloAttn": ("unsupported", "blocks of queries see halos of keys around them"),
    "models.efficientformer_v2.Attention2dDownsample": ("subsampled", ""),
    "models.levit.AttentionDownsample": ("subsampled", "queries are strided: an output is a coarser token"),
    "models.mvitv2.MultiScaleAttention": ("subsampled", ""),
    "models.mvitv2.MultiScaleAttentionPoolFirst": ("subsampled", ""),
    # Attention between channels.
    "models.davit.ChannelAttention": ("channel", ""),
    "models.davit.ChannelAttentionV2": ("channel", ""),
    "models.edgenext.CrossCovarianceAttn": ("channel", ""),
    "models.xcit.XCA": ("channel", ""),
    # No softmax over tokens.
    "layers.lambda_layer.LambdaLayer": ("linear", ""),
    "models.coat.FactorAttnConvRelPosEnc": ("linear", "keys meet values before queries do"),
    "models.efficientvit_mit.LiteMLA": ("linear", ""),
    "models.mobilevit.LinearSelfAttention": ("linear", ""),
    "models.swiftformer.EfficientAdditiveAttention": ("linear", ""),
    "models.volo.OutlookAttention": ("linear", "weights come from the query's token alone, without keys"),
    "models.nextvit.ConvAttention": ("linear", "a convolution by the name of attention"),
    # Gates of channels and places.
    "layers.cbam.CbamModule": ("gate", ""),
    "layers.cbam.LightCbamModule": ("gate", ""),
    "layers.coord_attn.CoordAttn": ("gate", ""),
    "layers.coord_attn.EfficientLocalAttn": ("gate", ""),
    "layers.coord_attn.SimpleCoordAttn": ("gate", ""),
    "layers.coord_attn.StripAttn": ("gate", ""),
    "layers.non_local_attn.BatNonLocalAttn": ("gate", ""),
    "layers.non_local_attn.BilinearAttnTransform": ("gate", ""),
    "layers.non_local_attn.NonLocalAttn": (
        "unsupported",
        "a non-local block of a convolutional network, without heads",
    ),
    "layers.selective_kernel.SelectiveKernelAttn": ("gate", ""),
    "layers.split_attn.SplitAttn": ("gate", ""),
    "models.csatv2.SpatialTransformerBlock": (
        "gate",
        "heads of one channel: without the part along the value nothing would be left",
    ),
}

ADAPTER = TableAdapter(
    "timm",
    layers={f"timm.{name}": row for name, row in _LAYERS.items()},
    others={f"timm.{name}": row for name, row in _OTHERS.items()},
)
