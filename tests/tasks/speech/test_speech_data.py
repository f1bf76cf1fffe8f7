"""Recordings in every layout: what is heard, on which side, and what is refused."""

import numpy as np
import pytest
import torch

from tasks.errors import UserError
from tasks.speech import synthetic
from tasks.speech.espeak import Speaker
from tasks.speech.features import noisy
from tasks.speech.recordings import spelled
from tests.tasks.speech.conftest import encoded, tone


def test_an_utterance_does_not_depend_on_what_was_said_before():
    speaker = Speaker()
    variants = synthetic.TRAINING_VARIANTS + synthetic.TEST_VARIANTS
    voices = [f"{accent}+{variant}" for accent in synthetic.ACCENTS for variant in variants]
    first = [speaker.say("seven", voice, 150, 50) for voice in voices]
    for voice, samples in zip(reversed(voices), reversed(first), strict=True):
        assert np.array_equal(speaker.say("seven", voice, 150, 50), samples), voice
    with pytest.raises(ValueError, match="no voice xx"):
        Speaker().say("a", "xx", 150, 50)


def test_sides_of_synthetic_speech_share_no_voice_and_no_sentence():
    for kind in ("words", "sentences"):
        recipe = synthetic.RECIPES[kind]
        train, test = (synthetic.script(recipe, train=side) for side in (True, False))
        voices = [{line.voice.partition("+")[2] for line in side} for side in (train, test)]
        assert not voices[0] & voices[1]
        if kind == "sentences":
            assert not {line.text for line in train} & {line.text for line in test}
    words = [line.text for line in synthetic.script(synthetic.Recipe("words", 380, 0), train=True)]
    assert {words.count(word) for word in synthetic.WORDS} == {10}


def test_a_damaged_cache_is_said_again(few):
    both = synthetic.synthetic("sentences", lambda what, share: None)
    path = next(synthetic.cache_root().glob("speech-sentences-*.npz"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = synthetic.synthetic("sentences", lambda what, share: None)
    assert [side.fingerprint for side in again] == [side.fingerprint for side in both]
    assert np.array_equal(again[0].audio, both[0].audio)


def test_features_are_the_normalised_log_mel_spectrum(speech, digits):
    task = speech("digits", f"data.path={digits}", "attention=sa")
    features, label = task.train.fetch(0, None)
    samples, _ = task.train.recordings.audio(0)
    # By the definition: windowed frames, power, triangular filters, logarithm.
    from torchaudio.functional import melscale_fbanks

    padded = torch.nn.functional.pad(torch.from_numpy(samples)[None].double(), (128, 128), "reflect")[0]
    window = torch.zeros(256, dtype=torch.float64)
    window[28:228] = torch.hann_window(200, dtype=torch.float64)
    frames = padded.unfold(0, 256, 80) * window
    power = torch.fft.rfft(frames).abs() ** 2 @ melscale_fbanks(129, 0, 4000, 40, 8000).double()
    expected = power.clamp_min(1e-6).log()
    expected = (expected - expected.mean()) / expected.std()
    assert features.shape == expected.shape
    assert torch.allclose(features.double(), expected, atol=1e-3)
    assert label == 0


def test_noise_has_the_power_that_was_asked_for():
    samples = tone(3, seconds=4.0)
    rng = np.random.default_rng(0)
    noise = noisy(samples, 7.0, rng).astype(np.float64) - samples
    ratio = 10 * np.log10(np.mean(samples.astype(np.float64) ** 2) / np.mean(noise**2))
    assert ratio == pytest.approx(7.0, abs=0.15)  # 32,000 samples: deviation of the estimate 0.03 dB


def test_spec_augment_masks_training_alone(speech, digits):
    overrides = (f"data.path={digits}", "data.time_masks=1", "data.mel_masks=1", "attention=sa")
    masked = speech("digits", *overrides).train
    plain = speech("digits", overrides[0], "attention=sa").train
    assert torch.equal(masked.fetch(1, None)[0], plain.fetch(1, None)[0])
    differs = masked.fetch(1, np.random.default_rng(1))[0] != plain.fetch(1, None)[0]
    changed = masked.fetch(1, np.random.default_rng(1))[0][differs]
    assert differs.any()
    assert (changed == 0).all()
    assert differs.all(1).any() or differs.all(0).any()


def test_nobody_is_heard_on_both_sides_of_a_speaker_split(speech, digits):
    task = speech(
        "digits", f"data.path={digits}", "data.split=speaker", "data.test_speakers=[bob]", "attention=sa"
    )
    names = [[side.recordings.name(i) for i in range(len(side))] for side in (task.train, task.held_out)]
    assert all("_bob_" not in name for name in names[0])
    assert all("_bob_" in name for name in names[1])
    assert (len(names[0]), len(names[1])) == (18, 9)


def test_librispeech_is_read_in_its_own_layout(speech, librispeech):
    task = speech("librispeech", f"data.path={librispeech.parent}", "data.workers=0", "attention=sa")
    _, target = task.train.fetch(1, None)
    assert "".join(" 'abcdefghijklmnopqrstuvwxyz"[letter - 1] for letter in target) == "so it's one"


def test_speech_commands_lists_are_honoured(speech, tmp_path):
    for word in ("yes", "no"):
        (tmp_path / word).mkdir()
        for number in range(4):
            (tmp_path / word / f"{number}.wav").write_bytes(encoded(tone(number, 16000), 16000))
    (tmp_path / "_background_noise_").mkdir()
    (tmp_path / "validation_list.txt").write_text("yes/0.wav\nno/0.wav\n")
    (tmp_path / "testing_list.txt").write_text("yes/1.wav\nno/1.wav\n")
    task = speech("speech_commands", f"data.path={tmp_path}", "data.workers=0", "attention=sa")
    assert task.words == ["no", "yes"]
    assert [path for path, _ in task.train.recordings.files] == [
        "no/2.wav",
        "no/3.wav",
        "yes/2.wav",
        "yes/3.wav",
    ]
    assert [path for path, _ in task.held_out.recordings.files] == ["no/0.wav", "yes/0.wav"]


def test_ljspeech_holds_out_by_a_hash_of_the_name(speech, tmp_path):
    (tmp_path / "wavs").mkdir()
    names = [f"LJ001-{number:04d}" for number in range(30)]
    for name in names:
        (tmp_path / "wavs" / f"{name}.wav").write_bytes(encoded(tone(1, 22050), 22050))
    rows = [f"{name}|Dr. {name}|doctor" for name in names]
    (tmp_path / "metadata.csv").write_text("".join(f"{row}\n" for row in rows))
    overrides = (f"data.path={tmp_path}", "data.validation_fraction=0.3", "data.workers=0", "attention=sa")
    task = speech("ljspeech", *overrides)
    sides = [{path for path, _ in side.recordings.files} for side in (task.train, task.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 30
    (tmp_path / "metadata.csv").write_text("".join(f"{row}\n" for row in reversed(rows)))
    again = speech("ljspeech", *overrides)
    assert {path for path, _ in again.held_out.recordings.files} == sides[1]


def test_a_wrong_sampling_rate_is_one_clear_line_or_converted(speech, librispeech):
    where = f"data.path={librispeech}"
    with pytest.raises(
        UserError, match=r"recorded at 16000 Hz, expected 8000; set data.sample_rate=16000"
    ) as caught:
        speech("librispeech", where, "data.sample_rate=8000", "attention=sa")
    assert "\n" not in str(caught.value)
    task = speech("librispeech", where, "data.sample_rate=8000", "data.resample=true", "attention=sa")
    assert len(task.train.fetch(0, None)[0]) == 101  # a second at 10 ms


def test_damaged_recordings_are_skipped_and_named(speech, librispeech):
    path = librispeech / "train-clean-100" / "1" / "2" / "1-2-0001.flac"
    path.write_bytes(path.read_bytes()[:300])
    task = speech("librispeech", f"data.path={librispeech}", "data.workers=0", "attention=sa")
    task.stream(0, 1).next_batch(3)
    assert task.data_note.startswith("1 damaged samples skipped (train-clean-100/1/2/1-2-0001.flac: ")


def test_data_that_cannot_be_used_get_one_line(speech, librispeech, digits, tmp_path):
    def refusal(experiment, *overrides):
        with pytest.raises(ValueError, match=r"\S") as caught:
            speech(experiment, "attention=sa", *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no directory" in refusal("digits", "data.path=/absent")
    assert "no shards named" in refusal("digits", f"data.path={empty}")
    assert "metadata.csv: not there" in refusal("ljspeech", f"data.path={empty}")
    assert "validation_list.txt: not there" in refusal("speech_commands", f"data.path={empty}")
    assert "no such folder" in refusal("librispeech", f"data.path={librispeech}", "data.train=other")
    assert "nobody called eva; expected some of ann, bob, cem" in refusal(
        "digits", f"data.path={digits}", "data.split=speaker", "data.test_speakers=[eva]"
    )
    assert "has no transcripts" in refusal("sentences", "data.source=digits", f"data.path={digits}")
    sentences = ("data.source=librispeech", f"data.path={librispeech}", "data.sample_rate=16000")
    assert "has sentences" in refusal("words", *sentences)
    (librispeech / "dev-clean" / "1" / "2" / "1-2-0001.flac").unlink()
    assert "not there; fetch it" in refusal("librispeech", f"data.path={librispeech}")


def test_a_transcript_without_room_is_a_damaged_sample(speech, librispeech):
    table = librispeech / "train-clean-100" / "1" / "2" / "1-2.trans.txt"
    table.write_text(f"1-2-0000 SHORT\n1-2-0001 {'VERY LONG ' * 30}\n")
    task = speech("librispeech", f"data.path={librispeech}", "data.workers=0", "attention=sa")
    task.stream(0, 1).next_batch(2)
    assert (
        "its transcript needs 299 positions, there are 26; take a smaller model.subsample" in task.data_note
    )


def test_spelling_keeps_letters_apostrophes_and_single_spaces():
    assert spelled("  Caf\u00e9 \u2014 DON\u2019T   stop, 3 times! ") == "cafe don't stop times"
