"""The live page: the history of the run and its picture."""
