"""The pages, and the programs that write some of them from the code."""
