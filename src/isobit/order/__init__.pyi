from isobit.order.cut import Cut as Cut
from isobit.order.samples import Samples as Samples
