"""Report of a compiled artifact as one HTML page, for `inspect --html` (docs/inspecting.md).

page.py assembles the sections, one file each. Their data comes from the artifact, from the folder of
`compile --dump-dir`, and from the JSON of `bench`.
"""
