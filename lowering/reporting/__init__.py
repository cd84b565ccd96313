"""A compiled artifact as one HTML page, for `inspect --html` (docs/inspecting.md).

page.py puts the sections together, a file each; what a section is about comes from the artifact, from the folder of
`compile --dump-dir`, and from the JSON of `bench`.
"""
