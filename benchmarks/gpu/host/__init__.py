"""What travels in a bundle and runs where the GPU is: nothing here needs the compiler."""
