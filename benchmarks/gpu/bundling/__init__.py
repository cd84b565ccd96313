"""What writes a bundle: everything here needs the compiler."""
