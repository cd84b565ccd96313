"""Coverage-guided fuzzing, by atheris, of what reads files from elsewhere: the importer and the artifact loader.

`python -m tests.attacks.fuzz importer --minutes 60` (or `loader`). Needs `pip install atheris`.
"""
