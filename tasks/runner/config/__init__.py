"""Configs: the schema, how YAML and overrides compose, and the hash that identifies a run."""
