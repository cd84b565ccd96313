"""Records of tuned kernels: tasks, choices, databases of measurements, and their lookup during compilation.

`tuning` writes the records, and `compiling` reads them; neither is imported here.
"""
