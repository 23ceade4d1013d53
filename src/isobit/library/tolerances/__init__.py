"""The tolerances of `isobit check` as a contract: each bound derived from the roundings that a kernel may make."""
