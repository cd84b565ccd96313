"""Models of exporters, and the tables that they give."""
