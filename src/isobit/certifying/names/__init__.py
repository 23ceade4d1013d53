"""Names of expressions: equal names mean equal bits for all inputs."""
