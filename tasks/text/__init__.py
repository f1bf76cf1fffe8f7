"""Text: corpora, tokenizers, loaders and the language-modelling task."""
