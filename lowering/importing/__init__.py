"""From ONNX to Relax: the walk over the graph, and what every operator is made of."""
