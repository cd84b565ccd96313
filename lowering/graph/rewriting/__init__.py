"""What every rewrite of a graph needs: queries about nodes, new nodes, opsets, and the sizes of all values."""
