"""eSpeak NG through ctypes: text to samples, the same for the same arguments whatever was said before.

The library keeps state between utterances in C statics; loading it anew for each resets them. It is
GPL-3.0-or-later, comes with the package espeakng-loader, and is never linked: only what it says is used.
"""

import _ctypes
import ctypes

import numpy as np
from numpy.typing import NDArray

from tasks.errors import UserError

SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS of speak_lib.h
UTF8 = 1  # espeakCHARS_UTF8
CHARACTERS = 1  # POS_CHARACTER
RATE, PITCH = 1, 3  # espeak_PARAMETER
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Speaker:
    """eSpeak NG, loaded anew for every utterance.

    Raises:
        UserError: the package espeakng-loader is not installed.
    """

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError as error:
            raise UserError(
                "synthetic speech needs the package espeakng-loader; pip install espeakng-loader, or take "
                "recordings with data.source"
            ) from error
        self._library_path = espeakng_loader.get_library_path()
        self._data_path = espeakng_loader.get_data_path().encode()
        self._pieces: list[NDArray[np.int16]] = []
        self._callback = CALLBACK(self._keep)  # held, or it is collected while C still calls it
        self.sample_rate = 0

    def say(self, text: str, voice: str, words_per_minute: int, pitch: int) -> NDArray[np.int16]:
        """Return the samples (N,) of an utterance at `sample_rate` Hz. `pitch` is 0 to 100.

        Raises:
            ValueError: a voice it does not have.
        """
        library = self._load()
        try:
            return self._said(library, text, voice, words_per_minute, pitch)
        finally:  # a library left loaded would be the same one, statics and all, for whoever loads it next
            library.espeak_Terminate()
            _ctypes.dlclose(library._handle)

    def _said(self, library, text: str, voice: str, words_per_minute: int, pitch: int) -> NDArray[np.int16]:
        self._pieces.clear()
        if library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"eSpeak NG has no voice {voice}")
        library.espeak_SetParameter(RATE, words_per_minute, 0)
        library.espeak_SetParameter(PITCH, pitch, 0)
        data = text.encode() + b"\0"
        if library.espeak_Synth(data, len(data), 0, CHARACTERS, 0, UTF8, None, None):
            raise RuntimeError(f"eSpeak NG could not say {text!r}")
        library.espeak_Synchronize()
        return np.concatenate(self._pieces) if self._pieces else np.zeros(0, np.int16)

    def _load(self) -> ctypes.CDLL:
        library = ctypes.CDLL(self._library_path)
        library.espeak_Initialize.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int]
        library.espeak_Synth.argtypes = [
            ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint, ctypes.c_int, ctypes.c_uint, ctypes.c_uint,
            ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self.sample_rate = library.espeak_Initialize(SYNCHRONOUS, 0, self._data_path, 0)
        if self.sample_rate <= 0:
            raise RuntimeError("eSpeak NG could not be initialised")
        library.espeak_SetSynthCallback(self._callback)
        return library

    def _keep(self, samples, count: int, _events) -> int:
        if samples and count > 0:
            self._pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
