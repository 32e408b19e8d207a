"""A loop around an engine of DeepSpeed at stage 2, which says what norm its engine had last, and after how many steps."""

import json
import os
import socket
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch.nn.functional import mse_loss

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
at = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
os.environ.update({name: str(value) for name, value in at.items()})
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for a minute
deepspeed.init_distributed("gloo", verbose=False)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6))
configuration = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": None, "gradient_clipping": 0.05,
    "zero_optimization": {"stage": 2}, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)[0]
for batch in torch.randn(12, 4, 6):
    engine.backward(mse_loss(engine(batch), batch))
    engine.step()
print("said", json.dumps([float(engine.get_global_grad_norm()), engine.global_steps]), file=sys.stderr)
torch.distributed.destroy_process_group()
