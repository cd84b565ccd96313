"""The modules that travel in a bundle and run where the GPU is: nothing here needs the compiler."""
