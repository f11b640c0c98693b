"""One of several processes that train on the CPU, which Ultralytics only does on GPUs.

What it takes for granted of a GPU is put right here: the backend, the device's number, and a mean
over processes that gloo does not know.
"""

import os
import sys

import torch
from torch import distributed, nn

from napari_beerlanet.core.common.events import run_process
from napari_beerlanet.core.training.distributed import main
from napari_beerlanet.core.training.trainer.trainer import StainTrainer

COUNT = int(os.environ["WORLD_SIZE"])
reduce, construct = distributed.reduce, StainTrainer.__init__


class OnCpu(nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, **settings):
        super().__init__(module, **settings)


def mean(tensor, dst, op):
    assert op is distributed.ReduceOp.AVG
    reduce(tensor, dst=dst)
    tensor /= COUNT


def with_world_size(self, *args, **kwargs):
    construct(self, *args, **kwargs)
    self.world_size = COUNT


def compare(self):
    """All processes must have the same weights in the end."""
    weights = [value.double().sum().item() for value in self.model.parameters()]
    everyones = [None] * COUNT
    distributed.all_gather_object(everyones, weights)
    assert everyones == [weights] * COUNT


nn.parallel.DistributedDataParallel = OnCpu
distributed.reduce = mean
StainTrainer.__init__ = with_world_size
StainTrainer.final_eval = compare
StainTrainer._setup_ddp = lambda self: distributed.init_process_group("gloo")
torch.set_num_threads(1)
run_process(lambda: main(sys.argv[1]))
