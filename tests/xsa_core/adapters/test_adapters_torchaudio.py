"""torchaudio: padding, WavLM's position bias, encoders that stay plain."""

from __future__ import annotations

import pytest
import torch
from zoo import CASES, WAV2VEC2

from xsa_core.adapters import convert, converted_layers, describe

torchaudio = pytest.importorskip("torchaudio")
EPS = torch.finfo(torch.float64).eps


def test_padding_has_no_influence_on_what_is_not_padding() -> None:
    """From the features on: the convolutions before them run over the padding, in the original as well."""
    case = CASES["audio-wav2vec2-lengths"]
    model = convert(case.model(torch.float64))
    with torch.no_grad():
        features, valid = model.feature_extractor(*case.arguments(torch.float64))
        noisy = features.clone()
        noisy[1, valid[1] :] = 50.0
        clean, disturbed = (model.encoder(x, valid) for x in (features, noisy))
        alone = model.encoder(features[1:, : valid[1]], valid[1:])
    kept = int(valid[1])
    assert kept < features.shape[1]
    assert torch.equal(clean[0], disturbed[0])
    assert torch.equal(clean[1, :kept], disturbed[1, :kept])
    assert (clean[1, :kept] - alone[0]).abs().max() <= 64 * EPS * alone.abs().max()


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
def test_wavlm_hands_its_position_bias_on_and_hides_padding() -> None:
    model = CASES["audio-wavlm"].model(torch.float64)
    layer = model.encoder.transformer.layers[0].attention
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    padding = torch.arange(9) >= torch.tensor([[9], [6]])
    expected, bias = layer(x, key_padding_mask=padding)
    got, again = convert(layer, strength=1e-200)(x, key_padding_mask=padding)
    assert torch.equal(bias, again)
    assert (got - expected).abs().max() <= 64 * EPS * expected.abs().max()
    noisy = torch.where(padding[..., None], 9.0, x)
    convert(layer, strength=1.0)
    outputs = [layer(y, key_padding_mask=padding, position_bias=bias)[0] for y in (x, noisy)]
    assert torch.equal(outputs[0][~padding], outputs[1][~padding])
    with pytest.raises(ValueError, match="key_padding_mask"):
        layer(x, attention_mask=torch.zeros(2, 1, 9, 9))


def test_the_weights_that_wavlm_keeps_in_another_layer_are_not_converted_twice() -> None:
    model = convert(CASES["audio-wavlm"].model())
    assert len(converted_layers(model)) == WAV2VEC2["encoder_num_layers"]
    assert {row.adapter for row in describe(model)} == {"torchaudio"}
    assert not any(path.endswith("attention.attention") for path in converted_layers(model))


def test_shapes_that_do_not_fit_are_refused_as_before() -> None:
    layer = convert(CASES["audio-wav2vec2"].model().encoder.transformer.layers[0].attention)
    with pytest.raises(ValueError, match="expected"):
        layer(torch.randn(2, 9, 15))
    with pytest.raises(ValueError, match="attention mask"):
        layer(torch.randn(2, 9, 16), attention_mask=torch.zeros(2, 9, 9))


def test_streaming_encoders_are_refused_by_name() -> None:
    model = torchaudio.models.Emformer(16, 2, 24, 1, segment_length=4)
    with pytest.raises(ValueError, match=r"emformer_layers\.0\.attention .* cannot be converted"):
        convert(model)
