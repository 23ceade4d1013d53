"""CUDA devices that do not exist: inside a world, programs that ask for them get CPU tensors.

[Note: served devices]
A rank that says `x.cuda()` gets a copy of `x` on the CPU, and the simulator remembers the device of that copy. Every
call of torch goes through a mode (`tensors.py`) that replaces the device in its arguments by the CPU, and gives its
results the device of its arguments, so that `x.device`, `.cpu()` and `.to()` answer as on a GPU: a copy is made exactly
where one would be. Gradients are made in C++ and get their device when they are read. `torch.cuda` and
`torch.accelerator` are replaced by functions of the current rank (`functions.py`); streams and events do nothing, since
calls are carried out in their order. What is not served raises an UnsupportedError with its name.
"""
