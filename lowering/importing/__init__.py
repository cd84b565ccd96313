"""Import of ONNX into Relax: the walk over the graph, and the building blocks of operator lowerings."""
