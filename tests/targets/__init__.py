"""Code for other machines."""
