"""The one config runner: configs, training loop, checkpoints and commands."""
