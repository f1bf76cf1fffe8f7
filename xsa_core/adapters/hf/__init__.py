"""Exclusive self attention in models of Hugging Face transformers.

The parts: `classes` (which modules are self attention), `attention` (the functions registered with
transformers), `layer` (a converted module, which catches the own values), `install` (registration, loading
and saving), `adapter` (what the registry of adapters calls). Nothing here imports transformers before a
model of it is at hand; `import xsa_core.adapters.transformers` does, and registers the attention functions.
"""
