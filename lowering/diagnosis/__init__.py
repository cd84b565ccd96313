"""`onnx-lowering doctor`: what is installed and what this machine has, without importing what may be broken."""
