"""`isobit.audit`: which operators make a model depend on the batch, and how much each of them matters."""
