"""One loss curve for every layout of ranks: the workload, its layouts, and the gate over them."""
