"""Synthetic images: the label sets the size of a bright disc, the group the background color.

A small network that learns the label also learns the group from the color of the background.
"""

import numpy as np

from fedgft.data.dataset import Dataset


def draw_images(rows: int = 240, size: int = 32, seed: int = 0) -> Dataset:
    """`rows` square color images of `size` pixels, with a label and a group each."""
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 2, rows)
    label = (rng.random(rows) < np.where(group == 1, 0.7, 0.3)).astype(np.int64)
    pixels = rng.integers(0, 90, (rows, size, size, 3))
    pixels[..., 0] += (80 * group)[:, None, None]
    high, wide = np.ogrid[:size, :size]
    for i in range(rows):
        at = rng.uniform(size / 3, 2 * size / 3, 2)
        radius = size / 6 + label[i] * size / 8
        pixels[i, (high - at[0]) ** 2 + (wide - at[1]) ** 2 < radius**2] += 80
    return Dataset(
        name="drawn",
        features=pixels.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2),
        labels=label,
        groups=group,
        columns=("red", "green", "blue"),
    )


def write_celeba_folder(folder, rows: int = 240, size: int = 32, seed: int = 0):
    """Write the same images as files in CelebA's layout, with its lists of three attributes."""
    from PIL import Image

    data = draw_images(rows, size, seed)
    (folder / "img_align_celeba").mkdir(parents=True)
    names = [f"{i + 1:06d}.jpg" for i in range(rows)]
    for name, pixels in zip(names, data.features.transpose(0, 2, 3, 1), strict=True):
        Image.fromarray(pixels).save(folder / "img_align_celeba" / name, quality=95)
    signs = 2 * np.stack((data.labels, data.groups, data.labels ^ data.groups), 1) - 1
    lines = [f"{n} {' '.join(f'{s:2d}' for s in row)}" for n, row in zip(names, signs, strict=True)]
    head = [str(rows), "Smiling Male Young"]
    (folder / "list_attr_celeba.txt").write_text("\n".join([*head, *lines]) + "\n")
    part = np.minimum(np.arange(rows) * 10 // rows, 9)  # 70% training, 10% validation, 20% test
    number = np.where(part < 7, 0, np.where(part < 8, 1, 2))
    both = [f"{n} {p}" for n, p in zip(names, number, strict=True)]
    (folder / "list_eval_partition.txt").write_text("\n".join(both) + "\n")
    people = [f"{n} {i % 8 + 1}" for i, n in enumerate(names)]
    (folder / "identity_CelebA.txt").write_text("\n".join(people) + "\n")
    return folder
