"""The expressions that the plan of isobit.order gives to an operator's outputs: what a kernel must compute.

[Note: plan and kernel]
The expressions are made from the plan (segments, leaves, trees, folds) and from the steps of the operators in
isobit/ops, without looking at a kernel. They are written once and evaluated in two domains (domain.py): `Names` gives
the names that a kernel's outputs must have, `Values` the bits. A kernel whose outputs have these names computes these
expressions, for all inputs. Where a plan leaves an executor some freedom that changes no bits, the expressions here
say what GPU kernels do:

- A run of products on a tensor core ends with a whole instruction: it is padded with products of +0 and +0 to a
  multiple of 16. Such products change no bits of NVIDIA's engines, and turn a sum of -0 into +0 on CDNA3;
  tests/certifying/test_padding.py compares every engine.
- A run of fp32 products is not padded.
- A block of keys of which a query sees no key is not folded into that query. A key that is not seen in a block has the
  score -inf, so its weight is +0, and it takes part in the sum of weights and in the product with its value. A block
  that reaches beyond the last key is filled with keys and values of +0, which are not seen.
- The output of a query that sees no key, +0, is divided by 1 instead of by the sum of its weights, which is 0.
- A difference with a constant is the sum with the negated constant, and x - n·c is x + n·(-c): the same value, and
  what compilers make of it.
"""
