"""Samples of any modality: where they come from, in which order, and what becomes of a damaged one."""
