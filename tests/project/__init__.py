"""The words, imports, docs and examples of the project."""
