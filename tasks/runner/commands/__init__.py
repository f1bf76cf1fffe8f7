"""One module per command, imported on use so that --help answers at once."""
