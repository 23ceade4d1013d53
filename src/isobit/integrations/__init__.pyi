from isobit.integrations import lightning as lightning
from isobit.integrations import transformers as transformers
from isobit.integrations import trl as trl
from isobit.integrations import vllm as vllm
