"""torchtitan's own trainer on CPUs and Gloo, to try a configuration where there is no GPU:

    torchrun --nproc-per-node 4 examples/torchtitan_on_cpu.py --module MODULE --config FUNCTION …

torchtitan takes it for granted that there is an accelerator. It looks for one when it is imported, so torch is told
before that to answer "cpu", and torch's module of that name gets what torchtitan asks about memory. Gloo takes no
device for a barrier, and does not multiply in a reduction. The arguments are those of `torchtitan.train`. On machines
with GPUs leave this file out: `torchrun … -m torchtitan.train …`.
"""

from types import SimpleNamespace

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 33)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
barrier = dist.barrier
dist.barrier = lambda *groups, device_ids=None, **named: barrier(*groups, **named)
set_factor = FSDPModule.set_gradient_divide_factor


def set_factor_for_gloo(module: FSDPModule, factor: float) -> None:
    set_factor(module, factor)
    module.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = set_factor_for_gloo

from torchtitan.train import main  # noqa: E402 - only now

if __name__ == "__main__":
    main()
