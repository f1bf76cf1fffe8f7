"""What the registry of adapters calls for models of transformers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from xsa_core.adapters.base import LEFT_ALONE, SELF, Coverage, Found, Settings
from xsa_core.adapters.exclusion import CHILD, Exclusion
from xsa_core.adapters.hf import classes
from xsa_core.adapters.hf.layer import CONVERTED, InterfaceLayer
from xsa_core.adapters.layer import build_exclusion, converted_class, plain_class
from xsa_core.attention.variants import VARIANTS

NAME = "transformers"

# transformers' names of ways to attend -> ours.
IMPLEMENTATIONS = {"eager": "xsa_eager", "sdpa": "xsa_sdpa"}
FUSED = "xsa_flash"
# Variants with something per head, for which the number of heads must be known.
_SIZED = {"xsa_learned", "head_norm", "random_direction"}


class TransformersAdapter:
    """See :class:`xsa_core.adapters.base.Adapter`.

    A converted module keeps its own forward. Its config names one of our attention functions, and carries
    under `xsa` what was converted, so that a saved model says so.
    """

    name = NAME

    def find(self, model: nn.Module) -> list[Found]:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        return [
            Found(path, module, kind, NAME, plain_class(module).__name__, reason)
            for path, module, kind, reason in classes.candidates(model)
        ]

    def check(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        if settings.variant == "diag_masked":
            able = ", ".join(name for name in VARIANTS if name != "diag_masked")
            raise ValueError(
                "variant diag_masked needs to know which key is the token's own, and the masks of "
                f"transformers do not tell: use one of {able}"
            )
        for row in found:
            if getattr(row.module, "config", None) is None:
                raise ValueError(
                    f"{row.path} ({row.cls}) has no config that could name its attention function: leave it "
                    "out with layers=lambda path: ..."
                )
            if "forward" in vars(row.module):
                raise ValueError(
                    f"{row.path} ({row.cls}): its forward was replaced, as accelerate does when it spreads a "
                    "model over devices; convert the model before that"
                )
            build_exclusion(row.module, *self._sizes(row, settings), settings)

    def attach(self, model: nn.Module, found: Sequence[Found], settings: Settings) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        from xsa_core.adapters.hf import install, marks

        install.install()
        for row in found:
            module = row.module
            module.add_module(CHILD, build_exclusion(module, *self._sizes(row, settings), settings))
            module.calls = {}
            module.__class__ = converted_class(type(module), InterfaceLayer)
            CONVERTED.add(module)
        for config in marks.configs(found):
            marks.name_function(config, settings.backend)

    def detach(self, model: nn.Module, found: Sequence[Found]) -> None:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        from xsa_core.adapters.hf import marks

        for row in found:
            original = plain_class(row.module)
            del row.module._modules[CHILD], row.module.calls
            row.module.__class__ = original
            CONVERTED.discard(row.module)
        for config in marks.configs(found):
            # Also those of another model that was built with the same config.
            if not any(getattr(m, "config", None) is config for m in CONVERTED):
                marks.name_plain_function(config)
        left = any(isinstance(m, Exclusion) for m in model.modules())
        if not left and hasattr(model, "config") and not marks.shared(model):
            marks.forget(model.config)

    def coverage(self) -> list[Coverage]:
        """See :class:`xsa_core.adapters.base.Adapter`."""
        from xsa_core.adapters.hf.table import rows

        return rows()

    @staticmethod
    def _sizes(row: Found, settings: Settings) -> tuple[int, int]:
        known = classes.sizes(row.module)
        if known is None and settings.variant in _SIZED:
            raise ValueError(
                f"{row.path} ({row.cls}): the number of heads is not known, and variant {settings.variant} "
                "has something per head; use xsa"
            )
        return known or (1, 1)


ADAPTER = TransformersAdapter()

__all__ = ["ADAPTER", "LEFT_ALONE", "SELF", "TransformersAdapter"]
