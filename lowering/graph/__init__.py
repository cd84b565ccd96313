"""The model as ONNX: read, checked, said more exactly, rewritten."""
