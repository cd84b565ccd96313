"""The modules that write a bundle: everything here needs the compiler."""
