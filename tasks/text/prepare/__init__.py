"""From raw text to token shards: sources, tokenizers, worker processes, a deterministic merge, a manifest.

The work is cut into units (row groups, ranges of bytes). Workers turn each unit into part files that are
written whole; one writer merges the parts in the order of the units into shards. So the shards depend on the
sources and the settings alone, never on the number of workers, on who finished first or on how often the
process was killed.
"""
