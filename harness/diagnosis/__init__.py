"""The diagnosis of failures: the catalogue of readings, the evidence of each case, and the decision of all cases."""
