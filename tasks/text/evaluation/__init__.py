"""Downstream evaluation of decoders with lm-evaluation-harness."""
