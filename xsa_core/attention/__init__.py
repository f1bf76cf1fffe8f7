"""Exclusive self attention: the operator, its masks and its backends."""

from xsa_core.attention.backends import BACKENDS, Request, backend_matrix, choose_backend
from xsa_core.attention.functional import attention_with_lse, exclude, exclusive_attention
from xsa_core.attention.masks import Mask
from xsa_core.attention.reference import reference_attention, reference_exclude

__all__ = [
    "BACKENDS",
    "Mask",
    "Request",
    "attention_with_lse",
    "backend_matrix",
    "choose_backend",
    "exclude",
    "exclusive_attention",
    "reference_attention",
    "reference_exclude",
]
