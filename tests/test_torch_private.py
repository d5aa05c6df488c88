"""What torch does not promise and fpipe uses: each test says what a new torch has broken."""

import torch
from torch.utils.checkpoint import CheckpointPolicy

from fpipe.torch_private.selective_checkpoint import all_ops, selective_checkpoint_answers


def test_torch_lists_the_ops_it_knows():
    assert torch.ops.aten.mm.default in all_ops(), "torch no longer lists its ops: checkpoint(save=policy) needs them"


def test_a_selective_checkpoint_policy_can_be_asked_without_a_forward():
    answers = selective_checkpoint_answers(lambda context, op: CheckpointPolicy.PREFER_SAVE)
    assert answers["aten.mm.default"], "a SelectiveCheckpointContext can no longer be made by hand"
