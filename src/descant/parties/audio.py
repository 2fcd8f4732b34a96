"""Sound as images: log-mel spectrograms, and parties from a folder of WAV files.

The format is that of the keyword spotting in "Robust Federated Learning Through Representation Matching and Adaptive
Hyper-parameters" (Mostafa, 2019, §4): 32 x 32 numbers per clip. The paper gives no more details. Window, hop, bands and
frequencies are those of the images in speech_commands_32x32.npz.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.seeds import ALL_PARTIES, stream
from ..core.settings import check_settings, setting
from ..errors import PartyError, SettingError
from . import partition
from .party import Array
from .population import Population, from_rows
from .readers import damaged_file_error, read_wave

Scale = Literal["slaney", "htk"]
_MIN_POWER = 1e-10  # lower limit of a band's power, because silence has no logarithm
_KNEE_HZ = 1000.0
_KNEE_MEL = 15.0
_STEP = np.log(6.4) / 27  # Slaney: linear below 1000 Hz, logarithmic above


@dataclass(frozen=True)
class _MelSettings:
    rate: int = setting(16_000, "samples per second", least=1, whole=True)
    window: float = setting(0.03, "length of a frame, in seconds", above=0)
    hop: float = setting(0.01, "time from one frame to the next, in seconds", above=0)
    mels: int = setting(40, "number of frequency bands", least=1, whole=True)
    low: float = setting(20.0, "lower edge of the lowest band, in Hz", least=0)
    high: float = setting(4000.0, "upper edge of the highest band, in Hz", above=0)
    scale: str = setting("slaney", "mel scale that determines the width of bands", one_of=("slaney", "htk"))
    size: Sequence[int] | None = setting(
        (32, 32), "rows and columns of the image; None: frames and bands as they are", least=1, whole=True
    )


def mel_spectrogram(
    wave: ArrayLike,
    rate: int = 16_000,
    window: float = 0.03,
    hop: float = 0.01,
    mels: int = 40,
    low: float = 20.0,
    high: float = 4000.0,
    scale: Scale = "slaney",
    size: Sequence[int] | None = (32, 32),
) -> NDArray[np.float32]:
    """Return a clip as an image ``[time, mel]``: log power in frequency bands, averaged to `size`.

    Uses Hann windows, the power spectrum of each frame, and triangular bands of equal area between `low` and `high`.
    `size=None` keeps frames and bands as they are. Bands and frames equal librosa's (`center=False`). The logarithm is
    natural.

    >>> tone = np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)
    >>> image = mel_spectrogram(tone)
    >>> image.shape, int(image.mean(0).argmax())
    ((32, 32), 13)
    """
    check_settings(
        _MelSettings(rate, window, hop, mels=mels, low=low, high=high, scale=scale, size=size), "mel_spectrogram"
    )
    if size is not None and np.shape(size) != (2,):
        raise SettingError(
            f"The 'size' of mel_spectrogram must be two numbers, rows and columns, or None. Got {size!r}."
        )
    window_samples = round(window * rate)
    step = max(1, round(hop * rate))
    if window_samples < 2:
        raise SettingError(f"The 'window' of mel_spectrogram must be at least 2 samples of 1/{rate} s. Got {window:g}.")
    signal = _validated_signal(wave, window_samples, window)
    hann = np.sin(np.pi * np.arange(window_samples) / window_samples) ** 2  # periodic form
    frames = np.lib.stride_tricks.sliding_window_view(signal, window_samples)[::step]  # [time, window]
    power = np.abs(np.fft.rfft(frames * hann)) ** 2  # [time, window // 2 + 1]
    bands = mel_filter_bank(rate, window_samples, mels, low=low, high=high, scale=scale)
    log_power: Array = np.log(np.maximum(power @ bands.T, _MIN_POWER))  # [time, mels]
    if size is not None:
        log_power = area_mean_matrix(len(log_power), size[0]) @ log_power @ area_mean_matrix(mels, size[1]).T
    image: NDArray[np.float32] = log_power.astype(np.float32)
    return image


def _validated_signal(wave: ArrayLike, window_samples: int, window: float) -> Array:
    """Return a clip as a flat array of at least one window; raise if it is not."""
    samples = np.asarray(wave)
    numeric = samples.dtype.kind in "buif"
    signal = samples.astype(np.float64) if numeric else np.empty(0)
    if signal.ndim != 1 or len(signal) < window_samples or not np.isfinite(signal).all():
        raise PartyError(
            f"A clip must be a flat array of finite numbers, at least the {window_samples} samples of a window of "
            f"{window:g} s. "
            f"Got {f'shape {signal.shape}' if numeric else samples.dtype}."
        )
    return signal


def mel_filter_bank(
    rate: int, window_samples: int, mels: int, low: float, high: float, scale: Scale = "slaney"
) -> Array:
    """Return the weight of each frequency in each band, ``[mels, window_samples // 2 + 1]``."""
    if not low < high <= rate / 2:
        raise SettingError(
            f"The bands must lie between 0 and {rate / 2:g} Hz, the limit for {rate} samples per second. "
            f"Got low={low:g}, high={high:g}."
        )
    frequencies = np.fft.rfftfreq(window_samples, 1 / rate)
    first, last = _hz_to_mel(np.array([low, high]), scale)
    edges = _mel_to_hz(np.linspace(first, last, mels + 2), scale)  # [mels + 2]
    rise = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    bands: Array = np.maximum(0, np.minimum(rise, fall)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    empty_bands = np.flatnonzero(~bands.any(1))
    if len(empty_bands):
        raise SettingError(
            f"{len(empty_bands)} of {mels} bands, the first at {edges[empty_bands[0] + 1]:.0f} Hz, contain no "
            f"frequency of a window of {window_samples} samples. Use fewer bands or a longer window."
        )
    return bands


def _hz_to_mel(hz: Array, scale: Scale) -> Array:
    if scale == "htk":
        return np.asarray(2595 * np.log10(1 + hz / 700))
    above = _KNEE_MEL + np.log(np.maximum(hz, _KNEE_HZ) / _KNEE_HZ) / _STEP
    return np.where(hz < _KNEE_HZ, hz * _KNEE_MEL / _KNEE_HZ, above)


def _mel_to_hz(mel: Array, scale: Scale) -> Array:
    if scale == "htk":
        return np.asarray(700 * (10 ** (mel / 2595) - 1))
    above = _KNEE_HZ * np.exp(_STEP * (np.maximum(mel, _KNEE_MEL) - _KNEE_MEL))
    return np.where(mel < _KNEE_MEL, mel * _KNEE_HZ / _KNEE_MEL, above)


def area_mean_matrix(n: int, size: int) -> Array:
    """Return the matrix ``[size, n]`` that averages `n` numbers to `size` numbers by overlapping length.

    >>> area_mean_matrix(3, 2).round(3).tolist()
    [[0.667, 0.333, 0.0], [0.0, 0.333, 0.667]]
    """
    ends = np.arange(size + 1) * n / size
    begin = np.maximum(ends[:-1, None], np.arange(n))
    end = np.minimum(ends[1:, None], np.arange(1, n + 1))
    means: Array = np.maximum(0, end - begin) * size / n
    return means


def spoken_words(
    folder: str | Path,
    count: int = 10,
    split: str = "dirichlet",
    alpha: float = 0.1,
    classes: int = 2,
    sigma: float = 2.0,
    exponent: float = 2.0,
    test: float = 0.2,
    seed: int = 0,
) -> Population:
    """Your WAV files over `count` parties, one folder per word, as images [1, 32, 32] of their first second.

    Files are 16-bit PCM with one channel and 16,000 samples per second, like Speech Commands; shorter files are padded
    with silence. Labels number the words in alphabetical order. Folders whose names begin with _ or . are left out. All
    numbers are standardized together. `split` and its settings are those of :func:`.partition.split_rows`.
    """
    folder = Path(folder)
    word_folders = sorted(part for part in folder.glob("[!_.]*") if part.is_dir())
    files = [(file, label) for label, part in enumerate(word_folders) for file in sorted(part.glob("*.wav"))]
    if not files:
        raise damaged_file_error(folder, "it has no WAV files", "one folder per word with *.wav files")
    images = np.stack([mel_spectrogram(_first_second(file)) for file, _ in files])[:, None]
    x = (images - images.mean()) / (images.std() or 1.0)
    y = np.array([label for _, label in files])
    rows = partition.split_rows(
        y, split, count, stream(seed, 0, ALL_PARTIES, purpose="words"), alpha, classes, sigma, exponent
    )
    return from_rows(x, y, rows, test=test, seed=seed)


def _first_second(file: Path, rate: int = 16_000) -> Array:
    signal = read_wave(file, rate)[:rate]
    return np.pad(signal, (0, rate - len(signal)))
