"""What the runner needs to know of the speech tasks before they are used; imports no torch."""

from tasks.base import TaskSpec
from tasks.speech.config import SpeechDataConfig, SpeechModelConfig


def open_keywords(config, display):
    """Open the data of a run; see `tasks.speech.keywords.KeywordTask.open`."""
    from tasks.speech.keywords import KeywordTask

    return KeywordTask.open(config, display)


def open_transcription(config, display):
    """Open the data of a run; see `tasks.speech.transcription.TranscriptionTask.open`."""
    from tasks.speech.transcription import TranscriptionTask

    return TranscriptionTask.open(config, display)


KEYWORDS = TaskSpec(SpeechModelConfig, SpeechDataConfig, open_keywords, metric="validation_accuracy")
TRANSCRIPTION = TaskSpec(
    SpeechModelConfig, SpeechDataConfig, open_transcription, metric="validation_character_error_rate"
)
