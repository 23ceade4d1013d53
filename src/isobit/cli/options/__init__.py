"""Options of the commands that load torch, in modules that do not, so that help is fast."""
