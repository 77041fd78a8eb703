"""The public names, for type checkers: at run time they are imported when first used."""

from thinwire.data_parallel.all_reduce import all_reduce as all_reduce
from thinwire.data_parallel.checkpoint import read_state as read_state
from thinwire.data_parallel.ddp import compress_ddp as compress_ddp
from thinwire.data_parallel.fsdp import compress_fsdp as compress_fsdp
from thinwire.data_parallel.reducer import Reducer as Reducer
from thinwire.data_parallel.tied_embedding import RowEmbedding as RowEmbedding
from thinwire.data_parallel.tied_embedding import TiedEmbedding as TiedEmbedding
from thinwire.data_parallel.tied_rows import TiedRows as TiedRows
from thinwire.data_parallel.trainers import compress_trainer as compress_trainer
from thinwire.local_steps.local_steps import LocalSteps as LocalSteps
from thinwire.local_steps.trainers import local_steps as local_steps
from thinwire.parallel.titan import compress_titan as compress_titan
from thinwire.pipeline.message_choice import Plan as Plan
from thinwire.pipeline.pipeline import Pipeline as Pipeline
from thinwire.pipeline.stage import CompressedStage as CompressedStage
