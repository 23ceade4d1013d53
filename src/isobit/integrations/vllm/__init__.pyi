from isobit.integrations.vllm.enabling import disable as disable
from isobit.integrations.vllm.enabling import enable as enable
from isobit.integrations.vllm.enabling import engine_arguments as engine_arguments
