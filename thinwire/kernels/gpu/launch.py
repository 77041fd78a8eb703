"""How the Triton kernels are launched: on the tensors' own device, without fused multiply-adds.

`enable_fp_fusion=False` keeps a product and a sum two roundings, as on the CPU. The kernels divide with
`div_rn`: Triton's plain `/` on float32 is approximate on the card. Denormals are kept, never flushed to zero.

Triton finds the compiled kernel anew at every launch, from the arguments, and the host spends three times as long on
that as on the launch itself. So it is found once for arguments of a kind, and called by its own handle then, with the
tensors' addresses: Triton would ask the driver about each tensor.

Loading a kernel onto the card waits for all that runs there. A kernel of NCCL may run until another rank sends, and
that rank may be loading too: then both wait for ever. So kernels are called before the first message
(distributed/precompile.py), and `new_kernels` = "refuse" finds those that were not.
"""

from __future__ import annotations

import itertools

import torch
import triton
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

TILE = 4096  # values a program handles: 32 a thread at four warps, enough loads in flight to fill the bus
WORD = 1 << 31
_compiled = {}  # everything that Triton compiles a kernel for → (the kernel, compiled, its constants in order)
new_kernels = (
    "load"  # one that was not called before; "expect": also for messages at other addresses; "refuse": an error
)


def launch(kernel, programs, first, *args, warps=4, registers=None, **constants):
    """Run `programs` programs of `kernel(first, *args, **constants)`; `first` (a tensor) names the device.

    `registers` caps those of a thread at what the path of full tiles needs: the masked path, of the last tile
    only, would take twice as many and halve the programs that fit the chip at a time.

    Returns (the kernel, compiled, its constants in order).
    """
    if not programs:
        return None
    args = first, *args
    if first.is_cuda:
        if first.get_device() == torch.cuda.current_device():
            return _run(kernel, programs, args, constants, warps, registers)
        with torch.cuda.device(first.device):
            return _run(kernel, programs, args, constants, warps, registers)
    elif isinstance(kernel, InterpretedFunction):
        return _run(kernel, programs, args, constants, warps, registers)
    else:
        raise ValueError(
            f"impl='gpu' was given a tensor on {first.device}: it needs CUDA tensors "
            "(or TRITON_INTERPRET=1 in the environment before triton is imported, for tests)"
        )


class Call:
    """Launches of a kernel for tensors of one size: what does not change from one to the next is worked out once."""

    def __init__(self, kernel, programs, numbers, *, warps=4, registers=None, **constants):
        """`kernel(*tensors, *numbers, *keys, **constants)`; numbers: those that do not change."""
        self.kernel, self.programs, self.numbers = kernel, programs, numbers
        self.constants = {"warps": warps, "registers": registers, **constants}
        self.found = {}  # of what kinds the tensors are → (the compiled kernel, its constants in order)

    def __call__(self, *tensors, keys=()):
        """keys: 32-bit integers."""
        device, addresses = tensors[0].get_device(), [x.data_ptr() for x in tensors]
        kinds = (device, *[x.dtype for x in tensors], *[address % 16 == 0 for address in addresses])
        compiled, order = self.found.get(kinds, (None, ()))
        same = compiled is not None and device == torch.cuda.current_device()
        if same and all(x.is_contiguous() for x in tensors):
            _start(compiled, self.programs, device, (*addresses, *self.numbers, *keys, *order))
        elif self.programs:
            found = launch(self.kernel, self.programs, *tensors, *self.numbers, *keys, **self.constants)
            if found is not None and found[1] is not None:
                self.found[kinds] = found[1:]


def _start(compiled, programs, device, values):
    known = compiled.function, compiled.packed_metadata, None, None, None  # no hooks
    compiled.run(programs, 1, 1, driver.active.get_current_stream(device), *known, *values)


def _run(kernel, programs, args, constants, warps, registers):
    device = args[0].get_device()
    key, values = [id(kernel), device, warps, registers, *constants.items()], []
    for x in args:
        if isinstance(x, torch.Tensor):
            if not x.is_contiguous():
                raise ValueError("GPU kernels take contiguous tensors")
            address = x.data_ptr()
            key += (x.dtype, address % 16 == 0)
            values.append(address)
        else:
            key.append((type(x) is int and -WORD <= x < WORD) or kind(x))  # most are small integers
            values.append(x)
    key = tuple(key)
    found = _compiled.get(key)
    if found is not None and found[1] is not None:
        _start(found[1], programs, device, (*values, *found[2]))
        return found
    if found is None and new_kernels == "refuse":
        raise RuntimeError(f"kernel {kernel.__name__} is loaded in a step: it was not called before the first one")
    options = {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}
    compiled = kernel[(programs,)](*args, **constants, **options)  # by the interpreter: None
    new = _compiled[key] = kernel, compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])
    if found is None and new_kernels == "expect":
        for others in otherwise_aligned(args):
            _run(kernel, programs, others, constants, warps, registers)
        if constants.get("ALIGNED"):  # a message may also lie where its words cannot be read at once
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            _run(kernel, programs, copies, {**constants, "ALIGNED": False}, warps, registers)
    return new


def otherwise_aligned(args):
    """Copies of the arguments in which messages (uint8) lie at other addresses: a multiple of 16, or not.

    Where in a message a sample's part begins depends on the parts before it, so all of these may come in a step.
    """
    messages = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dtype == torch.uint8]
    now = tuple(8 * bool(args[i].data_ptr() % 16) for i in messages)
    for offsets in itertools.product((0, 8), repeat=len(messages)):
        if offsets != now:
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            for i, offset in zip(messages, offsets):
                room = torch.empty(args[i].numel() + 16, dtype=torch.uint8, device=args[i].device)
                copies[i] = room[offset : offset + args[i].numel()].view(args[i].shape).copy_(args[i])
            yield copies


def kind(x):
    """What Triton compiles a kernel for: of a tensor dtype and alignment, of an integer its size.

    Not an integer's value: all our kernels name their integers in `do_not_specialize`.
    """
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return -(1 << 31) <= x < 1 << 31, x < 1 << 63
    return type(x)


def tiling(block, width, *, tile=TILE, warps=4, registers=None, least_rows=1):
    """SHAPE of a tile (tile.py), of `width` values a segment, and warps and registers as `launch` takes them.

    block: a multiple of 8. A tile is at least `least_rows` blocks; where that makes it larger than asked for, it gets
    more warps and no cap on registers.
    """
    if block % 8:
        raise ValueError(f"GPU kernels take blocks of a multiple of 8 values, not {block}")
    columns = triton.next_power_of_2(block)
    width = min(columns, width)
    rows = max(least_rows, tile // columns)
    larger = rows * columns // tile
    shape = (columns // width, rows, width)
    return {"SHAPE": shape, "warps": min(16, warps * larger), "registers": registers if larger == 1 else None}


def line(itemsize):
    """Values in 128 bytes, a cache line."""
    return 128 // itemsize


def signed(key):
    """A 32-bit key as a signed integer: Triton then gives the argument one type whatever its value."""
    return key - (1 << 32) if key >= 1 << 31 else key
