"""Modules over isobit's operators, and `freeze`, which keeps packed weights for decoding.

Each module is a subclass of its torch.nn counterpart with the same constructor, parameters and state
dict; SwiGLU, which has none, names its layers as Llama does. Every forward also takes the `samples=`
of its operator.
"""

from isobit.foundation.lazy import attach

__getattr__, __dir__, __all__, HOMES = attach(__name__, __file__)
