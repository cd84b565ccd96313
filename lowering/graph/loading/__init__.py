"""Models as they are read: files, legality, schemas, and inference of types and sizes."""
