"""The model as ONNX: loading, checks, inference of sizes and types, and rewrites."""
