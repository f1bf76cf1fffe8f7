"""What the runner needs to know of the multimodal tasks before they are used; imports no torch."""

from tasks.base import TaskSpec
from tasks.multimodal.config import (
    CaptioningModelConfig,
    ContrastiveModelConfig,
    FusionDataConfig,
    FusionModelConfig,
    PairDataConfig,
)


def open_contrastive(config, display):
    """Open the data of a run; see `tasks.multimodal.contrastive.ContrastiveTask.open`."""
    from tasks.multimodal.contrastive import ContrastiveTask

    return ContrastiveTask.open(config, display)


def open_captioning(config, display):
    """Open the data of a run; see `tasks.multimodal.captioning.CaptioningTask.open`."""
    from tasks.multimodal.captioning import CaptioningTask

    return CaptioningTask.open(config, display)


def open_fusion(config, display):
    """Open the data of a run; see `tasks.multimodal.fusion.FusionTask.open`."""
    from tasks.multimodal.fusion import FusionTask

    return FusionTask.open(config, display)


CONTRASTIVE = TaskSpec(
    ContrastiveModelConfig, PairDataConfig, open_contrastive, metric="validation_recall_at_1"
)
CAPTIONING = TaskSpec(CaptioningModelConfig, PairDataConfig, open_captioning, metric="validation_exact_match")
FUSION = TaskSpec(FusionModelConfig, FusionDataConfig, open_fusion, metric="validation_accuracy")
