"""Judge contracts: inputs, relations, sabotage, search and proofs."""
