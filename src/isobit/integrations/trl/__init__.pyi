from isobit.integrations.trl.grpo import GRPOTrainer as GRPOTrainer
from isobit.integrations.trl.grpo import OrderedGRPO as OrderedGRPO
from isobit.integrations.trl.reward import RewardTrainer as RewardTrainer
