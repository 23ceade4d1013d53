from isobit.nn.freezing import Frozen as Frozen
from isobit.nn.freezing import freeze as freeze
from isobit.nn.modules import Embedding as Embedding
from isobit.nn.modules import LayerNorm as LayerNorm
from isobit.nn.modules import Linear as Linear
from isobit.nn.modules import RMSNorm as RMSNorm
from isobit.nn.modules import SwiGLU as SwiGLU
