"""The command `onnx-lowering doctor`: installed packages and this machine, without importing what may be broken."""
