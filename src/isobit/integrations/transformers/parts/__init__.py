"""The parts of a model that add numbers, and how `isobit.enable` recognises them.

[Note: parts] A part is a kind of module that sums, together with its formula: a linear layer, an embedding, a norm, a
rotary table, an activation, a gated MLP, attention, a head. `enable` recognises parts and not model families.
Everything else (attention blocks, decoder layers, the model) is a composite: it calls parts and moves data, and runs
the code that its authors wrote. Strict mode checks that composites add nothing in an order of their own.

**The interface.** A file of this package has the forward functions of one part, over isobit's operators. A function is
`forward(*settings, module, *inputs)` at module level, so that it is copied and pickled with the model. `part.Part` is
the record of what was recognised: a name, the function, its settings and where it was recognised.
`recognition.find_part` returns it for a module, or raises an error that names the module. A part may read the layout
that is in force (`layout.current_layout()`): `samples` (which rows form which sample), `positions`, and `pending`, a
dictionary for what one module leaves for the next within a call. It must not read the shape of the batch for anything
else.

**Recognition**, in this order: a class that the user registered (`registry.py`); the digest of the source of the
class's forward (`source.py`), looked up in the tables of `digests.py`, which name where each source was read and which
a test recomputes; for norms and rotations, probing (`probing.py`): the stock code is run on inputs of several kinds and
compared with each formula. Composites are accepted if their digest is shipped, or if their source only calls children
and moves data (`plumbing.py`). A model that has a class without a shipped digest is compared with its own stock
forward on eight tokens when it is enabled (`meaning.py`): strict mode shows the order, not the meaning.

**Composites** run their own code object with the rotation of queries and keys re-bound (`composites.py`):
`types.FunctionType(forward.__code__, {**globals, "apply_rotary_pos_emb": ours})`. Nothing global is patched.

**Sibling linears** share an input, and dX is one sum over all of them. The source of a composite says which children it
calls with one name that is not assigned in between (`source.find_siblings`). `linear.Siblings` is their list, a setting
of each one's `Part`. The first that is called computes all as one `linear_group` and leaves the outputs in
`layout.pending`, by the siblings and the identity of the input; so each module is called, and its hooks run. A wrapper
takes part if `linear.base_linear` returns the layer that it wraps: then the wrapped layers are siblings, and the
wrapper's own part calls them with the composite's input, the same tensor object for each.
"""
