"""Planted faults: does the suite turn red where the code goes wrong? `make mutants` plants each and shows it."""
