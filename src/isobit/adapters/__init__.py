"""Models of other libraries, run by the operators of this one."""
