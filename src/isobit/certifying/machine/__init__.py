"""A machine that runs PTX on numpy arrays: the bits of every value, and beside them its name."""

from isobit.certifying.machine.machine import Machine
from isobit.certifying.machine.memory import Buffer, Pointer
from isobit.certifying.machine.tensor_maps import TensorArgument

__all__ = ["Buffer", "Machine", "Pointer", "TensorArgument"]
