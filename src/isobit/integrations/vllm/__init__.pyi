from isobit.integrations.vllm.enabling import disable as disable
from isobit.integrations.vllm.enabling import enable as enable
from isobit.integrations.vllm.enabling import engine_arguments as engine_arguments
from isobit.integrations.vllm.rollouts import Completion as Completion
from isobit.integrations.vllm.rollouts import Rollouts as Rollouts
