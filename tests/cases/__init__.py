"""Problems and models that several folders compile, with their float64 references."""
