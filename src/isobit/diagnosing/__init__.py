"""`isobit diagnose`: from the files that a run left to the cause, by the evidence of the other tools."""
