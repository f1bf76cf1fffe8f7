"""Importing this module registers `xsa_eager`, `xsa_sdpa` and `xsa_flash` with transformers.

    import xsa_core.adapters.transformers
    model.set_attn_implementation("xsa_sdpa")

`xsa_core.convert(model)` does the same and takes layers, strength and variant. A converted model that was
saved needs this import before it is loaded; without it, transformers refuses to load it.
"""

from xsa_core.adapters.hf.adapter import ADAPTER
from xsa_core.adapters.hf.install import install
from xsa_core.adapters.hf.marks import NAMES

install()

__all__ = ["ADAPTER", "NAMES"]
