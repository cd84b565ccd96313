"""What is known of a model before it is trusted: nodes that cannot be lowered, and answers beside a reference."""
