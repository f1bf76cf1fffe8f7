"""Timing, side by side with what people would use instead."""
