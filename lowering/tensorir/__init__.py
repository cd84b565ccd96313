"""What several parts share about TensorIR."""
