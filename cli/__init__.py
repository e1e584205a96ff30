"""The `oxidize` command."""
