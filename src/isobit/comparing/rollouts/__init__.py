"""What a rollout engine and a trainer computed for the same tokens; public as isobit.rollout."""
