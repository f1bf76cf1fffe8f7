"""What every config section shares: strict types, no unknown keys, no changes after validation."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """One section of a config. A key it does not know, or a value of another type, is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)
