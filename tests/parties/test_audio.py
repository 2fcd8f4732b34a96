"""Log-mel spectrograms: equality with librosa, bands by pitch, and invalid WAV files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset_files import write_wave
from descant import parties
from descant.errors import PartyError, SettingError
from descant.parties.audio import area_mean_matrix, mel_filter_bank

RATE = 16_000


def tone(hz: float, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(int(RATE * seconds)) / RATE)


def chirp(n: int = 2000) -> np.ndarray:
    """Return a sound that needs no random numbers."""
    t = np.arange(n) / RATE
    return 0.5 * np.sin(2 * np.pi * (200 + 8000 * t) * t) + 0.1 * np.sin(2 * np.pi * 3100 * t)


GOLDEN = {  # every third row of the image
    "slaney": [
        [12.01478, 1.094694, 2.172856e-06, 4.307271e-09, 0.1389906, 0.03807989],
        [0.08481069, 10.04012, 2.697968, 7.222057e-06, 0.1389907, 0.03807989],
        [6.180316e-08, 0.005409393, 7.657748, 2.051053, 0.1389908, 0.03807989],
        [2.119056e-09, 4.548301e-08, 0.1722964, 6.654376, 0.470515, 0.03807989],
    ],
    "htk": [
        [11.3744, 3.730064, 5.74869e-05, 3.754551e-09, 0.1584355, 0.02275911],
        [0.0009551638, 6.986432, 3.748882, 9.989014e-06, 0.1584355, 0.02275911],
        [1.730356e-08, 0.002573822, 6.554268, 1.684336, 0.1584355, 0.02275911],
        [1.138278e-09, 3.001073e-08, 0.6752814, 5.90143, 0.2198966, 0.02275913],
    ],
}


@pytest.mark.parametrize("scale", ["slaney", "htk"])
def test_spectrograms_equal_stored_values_of_librosa(scale: str) -> None:
    """Stored values, made by librosa 0.11.0 (feature.melspectrogram, center=False) as in the next test."""
    image = parties.mel_spectrogram(chirp(), mels=6, low=50.0, high=6000.0, scale=scale, size=None)  # type: ignore[arg-type]
    assert image.shape == (10, 6) and image.dtype == np.float32
    assert np.allclose(image[::3], np.log(GOLDEN[scale]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", ["slaney", "htk"])
def test_spectrograms_equal_librosa_if_installed(scale: str) -> None:
    librosa = pytest.importorskip("librosa")
    for mels, low, high in ((40, 20.0, 4000.0), (6, 50.0, 6000.0), (30, 0.0, 8000.0)):
        power = librosa.feature.melspectrogram(
            y=chirp(RATE),
            sr=RATE,
            n_fft=480,
            hop_length=160,
            center=False,
            n_mels=mels,
            fmin=low,
            fmax=high,
            htk=scale == "htk",
        )
        image = parties.mel_spectrogram(chirp(RATE), mels=mels, low=low, high=high, scale=scale, size=None)  # type: ignore[arg-type]
        assert np.allclose(image, np.log(np.maximum(power.T, 1e-10)), atol=1e-4)


@settings(deadline=None, max_examples=25)
@given(st.floats(150, 3700), st.sampled_from(["slaney", "htk"]))
def test_a_pure_tone_is_strongest_in_its_band(hz: float, scale: str) -> None:
    bands = mel_filter_bank(RATE, 480, 40, low=20.0, high=4000.0, scale=scale)  # type: ignore[arg-type]
    image = parties.mel_spectrogram(tone(hz), scale=scale, size=None)  # type: ignore[arg-type]
    strongest = int(image.mean(0).argmax())
    frequencies = np.fft.rfftfreq(480, 1 / RATE)[bands[strongest] > 0]
    step = RATE / 480
    assert image.shape == (98, 40) and frequencies.min() - step <= hz <= frequencies.max() + step


def test_the_strongest_band_follows_the_pitch() -> None:
    strongest = [int(parties.mel_spectrogram(tone(hz)).mean(0).argmax()) for hz in (200, 400, 800, 1600, 3200)]
    assert strongest == sorted(set(strongest))
    two_tones = np.concatenate([tone(300, 0.5), tone(3000, 0.5)])
    image = parties.mel_spectrogram(two_tones)
    assert image.shape == (32, 32) and image[:15].mean(0).argmax() < 10 < 25 < image[17:].mean(0).argmax()


@given(st.floats(0.1, 10.0))
@settings(deadline=None, max_examples=10)
def test_a_gain_adds_a_constant(gain: float) -> None:
    """The power of g·x is g² times that of x."""
    noise = np.random.default_rng(0).normal(size=RATE)  # so that no band is silent
    quiet, loud = (parties.mel_spectrogram(factor * noise) for factor in (1.0, gain))
    assert np.allclose(loud - quiet, 2 * np.log(gain), atol=1e-3)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50), st.integers(1, 50))
def test_area_means_weigh_all_numbers_equally(n: int, size: int) -> None:
    means = area_mean_matrix(n, size)
    assert means.shape == (size, n) and (means >= 0).all()
    assert np.allclose(means.sum(1), 1) and np.allclose(means.sum(0), size / n)
    if n % size == 0:
        assert np.allclose(means @ np.arange(n), np.arange(n).reshape(size, -1).mean(1))


def test_silence_is_finite() -> None:
    assert np.allclose(parties.mel_spectrogram(np.zeros(RATE)), np.log(1e-10))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"wave": np.zeros(479)}, PartyError, r"at least the 480 samples of a window of 0.03 s. Got shape \(479,\)"),
        ({"wave": np.zeros((2, 800))}, PartyError, r"a flat array.*Got shape \(2, 800\)"),
        ({"wave": np.full(800, np.nan)}, PartyError, "must be a flat array of finite numbers"),
        ({"high": 8001.0}, SettingError, "between 0 and 8000 Hz.*Got low=20, high=8001"),
        ({"low": 4000.0}, SettingError, "Got low=4000, high=4000"),
        (
            {"mels": 200},
            SettingError,
            r"of 200 bands, the first at \d+ Hz, contain no frequency of a window of 480 samples",
        ),
        ({"scale": "bark"}, SettingError, "The 'scale' of mel_spectrogram must be one of 'slaney', 'htk'"),
        ({"hop": 0.0}, SettingError, "The 'hop' of mel_spectrogram must be > 0"),
        ({"size": (3,)}, SettingError, r"The 'size' of mel_spectrogram must be two numbers, .* or None. Got \(3,\)"),
        ({"size": 32}, SettingError, r"The 'size' of mel_spectrogram must be two numbers, .* or None. Got 32"),
        ({"size": "32"}, SettingError, r"The 'size' of mel_spectrogram must be"),
        ({"window": 1e-6}, SettingError, "The 'window' of mel_spectrogram must be .* 2 samples.* Got 1e-06"),
        ({"wave": np.ones(RATE) * 1j}, PartyError, "must be a flat array of finite numbers.*Got complex128"),
        ({"wave": ["a"] * RATE}, PartyError, "must be a flat array of finite numbers.*Got <U1"),
        ({"size": (32, 0)}, SettingError, "The 'size' of mel_spectrogram must be a whole number >= 1. Got 0"),
    ],
)
def test_invalid_clips_and_settings_are_rejected(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        parties.mel_spectrogram(**{"wave": np.zeros(RATE), **arguments})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=50))
def test_a_wav_file_is_read_as_written(tmp_path_factory: pytest.TempPathFactory, values: list[int]) -> None:
    file = write_wave(tmp_path_factory.mktemp("wav") / "a.wav", np.array(values) / (2**15 - 1))
    samples = parties.read_wave(file)
    assert samples.dtype == np.float32 and (np.abs(samples) <= 1).all()
    assert np.allclose(samples * 2**15, np.array(values), atol=1)


def test_an_invalid_wav_file_is_named(tmp_path: Path) -> None:
    sound = chirp(400)
    cases = {
        "slow.wav": (write_wave(tmp_path / "slow.wav", sound, rate=8000), "it has 1 channels of 16 bits, 8000 samples"),
        "both.wav": (write_wave(tmp_path / "both.wav", sound, channels=2), "it has 2 channels"),
        "fine.wav": (write_wave(tmp_path / "fine.wav", sound, width=4), "1 channels of 32 bits"),
        "none.wav": (write_wave(tmp_path / "none.wav", sound[:0]), "it ends after 0 of 0 samples"),
        "text.wav": (tmp_path / "text.wav", "file does not start with RIFF id"),
        "gone.wav": (tmp_path / "gone.wav", "There is no file"),
        "half.wav": (write_wave(tmp_path / "half.wav", sound), "it ends after 178 of 400 samples"),
    }
    (tmp_path / "text.wav").write_text("not a sound")
    half = tmp_path / "half.wav"
    half.write_bytes(half.read_bytes()[:400])
    for name, (file, message) in cases.items():
        with pytest.raises(PartyError, match=message) as error:
            parties.read_wave(file)
        assert name in str(error.value) and "16-bit PCM, one channel, 16000 samples per second" in str(error.value)
    for _ in range(half.stat().st_size):
        half.write_bytes(half.read_bytes()[:-1])
        with pytest.raises(PartyError, match=r"half.wav cannot be used"):
            parties.read_wave(half)


def test_a_folder_of_words_becomes_parties(tmp_path: Path) -> None:
    for word, hz in (("yes", 400), ("no", 2000)):
        for k in range(6):
            write_wave(tmp_path / word / f"{k}.wav", 0.5 * tone(hz, (0.5, 1.0, 1.25)[k % 3]) + 0.01 * k)
    write_wave(tmp_path / "_background_noise_" / "hum.wav", tone(50, 3))
    population = parties.spoken_words(tmp_path, count=3, split="iid", test=0.25)
    x, y = (
        torch.cat([getattr(population[name], part + end) for name in population for end in ("", "_test")])
        for part in "xy"
    )
    assert x.shape == (12, 1, 32, 32) and x.dtype == torch.float32 and sorted(y.tolist()) == [0] * 6 + [1] * 6
    assert x.mean().abs() < 1e-5 and abs(float(x.std(correction=0)) - 1) < 1e-5
    for label, low, high in ((0, 18, 24), (1, 3, 7)):  # "no" comes before "yes"
        strongest = x[y == label][:, 0, :14].mean((0, 1)).argmax()
        assert low <= int(strongest) <= high


def test_an_empty_folder_and_an_invalid_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(PartyError, match=r"it has no WAV files. Expected one folder per word with \*.wav files"):
        parties.spoken_words(tmp_path)
    write_wave(tmp_path / "yes" / "1.wav", tone(400))
    write_wave(tmp_path / "yes" / "2.wav", tone(400), rate=22_050)
    with pytest.raises(PartyError, match=r"yes.2.wav cannot be used: it has 1 channels of 16 bits, 22050 samples"):
        parties.spoken_words(tmp_path)
