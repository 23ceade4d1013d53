from isobit.sampling.drawing import Drawn as Drawn
from isobit.sampling.drawing import request_number as request_number
from isobit.sampling.drawing import sample as sample
from isobit.sampling.dropout import dropout_key as dropout_key
from isobit.sampling.dropout import keyed_dropout as keyed_dropout
from isobit.sampling.support import Truncation as Truncation
from isobit.sampling.support import support_ids as support_ids
