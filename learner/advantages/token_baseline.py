"""The baseline that varies with the action, so as to minimise the variance of the gradient.

# B rows (answers), T actions, V vocabulary
"""

from torch import Tensor

from slipstream.learner.advantages.base import AdvantageInputs, given
from slipstream.learner.advantages.groups import group_sum
from slipstream.learner.advantages.returns import reward_to_go


def optimal_token_baseline(inputs: AdvantageInputs, *, epsilon: float) -> Tensor:
    """Reward to go less B_t = Σ_i G_{i,t} W_{i,t} / (Σ_i W_{i,t} + epsilon), shape [B, T].

    The sums run over the answers i of the group that have a t-th action, G is the reward to go and W_{i,t} the sum of
    1 - 2 π(action) + Σ_v π(v)² over the answer's actions up to t: the squared norm of the gradient of log π with
    respect to the logits, which stands for that with respect to the weights. So an answer that outlasts the others of
    its group has an advantage of nearly 0 from there on.

    Source: Li et al. 2026 (The Optimal Token Baseline), arXiv 2602.07078; verl 0.9.1, `optimal_token_baseline`, with
    its special cases for a group's longest answer and for groups of one left off.
    """
    logprobs_BT = given(inputs.logprobs_BT, "logprobs_BT")
    collision_BT = given(inputs.collision_BT, "collision_BT")
    # Of a sure action it is 0, and rounding may take it below.
    norm_BT = (1 - 2 * logprobs_BT.exp() + collision_BT).clamp(min=0) * inputs.mask_BT
    weight_BT = norm_BT.cumsum(-1) * inputs.mask_BT
    to_go_BT = reward_to_go(inputs, 1.0)
    baseline_BT = group_sum(weight_BT * to_go_BT, inputs) / (group_sum(weight_BT, inputs) + epsilon)
    return (to_go_BT - baseline_BT) * inputs.mask_BT
