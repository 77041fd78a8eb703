"""The public names, for type checkers: at run time they are imported when first used."""

from thinwire import codecs as codecs
from thinwire import collectives as collectives
from thinwire import elastic as elastic
from thinwire import kernels as kernels
from thinwire import lab as lab
from thinwire import memory as memory
from thinwire import parallel as parallel
from thinwire import planner as planner
from thinwire import theory
from thinwire.codecs import Codec as Codec
from thinwire.config import wire as wire
from thinwire.config.wire import Link as Link
from thinwire.config.wire import Reduction as Reduction
from thinwire.config.wire import Wire as Wire
from thinwire.data_parallel import frozen_adam
from thinwire.data_parallel.all_reduce import all_reduce as all_reduce
from thinwire.memory import Memory as Memory
from thinwire.memory.channel import Channel as Channel

convex = theory
optim = frozen_adam
__version__: str
bf16_guard: str
