"""The config section of an optimizer."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(BaseModel):
    """One switch, `name`; `lr` is for hidden matrices under Muon and for everything under AdamW."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: Literal["adamw", "muon", "muon_torch"]
    lr: Positive = Field(description="peak learning rate")
    weight_decay: NonNegative = Field(
        0.1, description="of matrices and embeddings; never of norms, biases, strengths"
    )
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-8
    adam_lr: Positive | None = Field(None, description="Muon only: peak rate of what is not a hidden matrix")
    momentum: Decay = Field(0.95, description="Muon only")
    lr_scale: Literal["keller_jordan", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="Muon only: scale of the update by shape; match_rms_adamw lets AdamW's rate serve both",
    )
