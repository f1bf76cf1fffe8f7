"""Exclusive self attention in models of Hugging Face transformers.

    classes     which modules are self attention, by their code, class and place
    attention   the functions registered with transformers; masks: the masks that go with them
    layer       a converted module, which learns where the values of its own tokens are
    install     registration; marks: what a config says of a conversion, saved and loaded
    adapter     what the registry of adapters calls
    walk        writes coverage.json, from every model type there is; table: reads it

Nothing here imports transformers before a model of it is at hand; `import xsa_core.adapters.transformers`
does, and registers the attention functions.
"""
