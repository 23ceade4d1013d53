"""A machine that runs PTX on numpy arrays: the bits of every value, and beside them its name."""

from isobit.certifying.machine.bulk_copies import TensorArgument
from isobit.certifying.machine.machine import Machine
from isobit.certifying.machine.memory import Buffer, Pointer

__all__ = ["Buffer", "Machine", "Pointer", "TensorArgument"]
