from isobit.nn.embedding import Embedding as Embedding
from isobit.nn.freezing import Frozen as Frozen
from isobit.nn.freezing import freeze as freeze
from isobit.nn.linear import Linear as Linear
from isobit.nn.norms import LayerNorm as LayerNorm
from isobit.nn.norms import RMSNorm as RMSNorm
from isobit.nn.swiglu import SwiGLU as SwiGLU
