"""Pack images without loss by each codec of a replay buffer: bytes an image, and the time to pack and to unpack it.

    python docs/examples/packed_images.py                             # CIFAR-10, or generated images if it is missing
    python docs/examples/packed_images.py --data fashion-mnist

Images are read from the folder that MEMHIER_DATA names; see `memhier.benchmarks.datasets`. JPEG XL takes part where
pillow-jxl-plugin is installed. Times are processor time, the least of three rounds.
"""

import argparse
import time

import numpy as np

from memhier.benchmarks.datasets import load_images
from memhier.recsys.replay.codecs.choice import field_codec
from memhier.recsys.replay.schema import Column


def read_images(data: str, count: int) -> np.ndarray:
    """Return images: real ones where they are."""
    if data != "generated":
        try:
            return np.ascontiguousarray(load_images(data).train[:count])
        except FileNotFoundError as error:
            print(f"{error}; generated images take its place")
    coarse = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), np.uint8)
    return coarse.repeat(4, axis=1).repeat(4, axis=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10", choices=["cifar10", "fashion-mnist", "mnist", "generated"])
    parser.add_argument("--count", type=int, default=500, help="images")
    options = parser.parse_args()
    images = read_images(options.data, options.count)
    print(f"plain: {images[0].nbytes:,} bytes an image")
    for name in ("zstd", "png", "webp:lossless", "lossless", "jxl"):
        try:
            codec = field_codec(name, Column(np.dtype(np.uint8), images.shape[1:]))
        except ImportError as error:
            print(f"{name}: left out: {error}")
            continue
        encoding, decoding, unpacked = [], [], np.empty_like(images)
        for _ in range(3):
            start = time.process_time()
            packed = codec.encode(images)
            middle = time.process_time()
            codec.decode([memoryview(image) for image in packed], unpacked)
            encoding.append(1e6 * (middle - start) / len(images))
            decoding.append(1e6 * (time.process_time() - middle) / len(images))
        assert np.array_equal(unpacked, images)
        size = sum(map(len, packed)) / len(images)
        print(f"{name}: {size:,.0f} bytes an image, {min(encoding):,.0f} us to pack, {min(decoding):,.0f} us to unpack")


if __name__ == "__main__":
    main()
