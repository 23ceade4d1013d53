from isobit.order.cut import Cut as Cut
from isobit.order.engines import tensor_core as tensor_core
from isobit.order.plan import FeaturePlan as FeaturePlan
from isobit.order.samples import Samples as Samples
from isobit.order.tree import find_roots as find_roots
from isobit.order.tree import merge as merge
