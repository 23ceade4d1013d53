from isobit.integrations.trl.gkd import GKDTrainer as GKDTrainer
from isobit.integrations.trl.gkd import OrderedGKD as OrderedGKD
from isobit.integrations.trl.grpo import GRPOTrainer as GRPOTrainer
from isobit.integrations.trl.grpo import OrderedGRPO as OrderedGRPO
from isobit.integrations.trl.reward import RewardTrainer as RewardTrainer
