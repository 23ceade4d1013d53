"""A machine that runs PTX on numpy arrays: the bits of every value, and beside them its name."""

from isobit.compiled.machine.machine import Machine
from isobit.compiled.machine.memory import Buffer, Pointer
from isobit.compiled.machine.tensor_maps import TensorArgument

__all__ = ["Buffer", "Machine", "Pointer", "TensorArgument"]
