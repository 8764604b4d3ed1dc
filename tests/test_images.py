"""Folders of images with a table, and the official layout of CelebA, with drawn pictures."""

import os
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from PIL import Image, ImageDraw, ImageOps

from fedgft.data import image_cache as pixels
from fedgft.data.images import load_celeba, load_images
from fedgft.errors import FedgftError

ATTRIBUTES = ("5_o_Clock_Shadow", "Male", "Smiling", "Young")
COUNT = 12


def face(number, width=30, height=36):
    """A head, two eyes and a mouth on a color of its own; no two alike."""
    image = Image.new("RGB", (width, height), (20 * number % 256, 90, 255 - 20 * number % 256))
    draw = ImageDraw.Draw(image)
    draw.ellipse((5, 4, width - 6, height - 5), fill=(230, 180 - number, 150))
    for x in (11, width - 13):
        draw.rectangle((x, 13, x + 2, 15), fill=(30, 30, 60))
    draw.arc((10, 18, width - 11, 27), 0, 180, fill=(150, 20, 20), width=2)
    return image


def signs_of(number):
    """Smiling, Male and Young are independent of each other; the first is always absent."""
    return (0, number & 1, number >> 1 & 1, number >> 2 & 1)


def part_of(number):
    return 0 if number < 7 else 1 if number < 9 else 2


@pytest.fixture
def celeba(tmp_path):
    """The official layout, with people of three images each."""
    folder = tmp_path / "celeba"
    (folder / "img_align_celeba").mkdir(parents=True)
    names = [f"{number + 1:06}.jpg" for number in range(COUNT)]
    for number, name in enumerate(names):
        face(number).save(folder / "img_align_celeba" / name, quality=95)
    signs = ["  ".join("1" if s else "-1" for s in signs_of(n)) for n in range(COUNT)]
    rows = [f"{name} {sign}" for name, sign in zip(names, signs, strict=True)]
    write(folder / "list_attr_celeba.txt", [str(COUNT), " ".join(ATTRIBUTES) + " ", *rows])
    write(folder / "list_eval_partition.txt", [f"{n} {part_of(i)}" for i, n in enumerate(names)])
    write(folder / "identity_CelebA.txt", [f"{n} {10 - i // 3}" for i, n in enumerate(names)])
    return folder


@pytest.fixture
def album(tmp_path):
    """Twelve lossless pictures and a table."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(COUNT):
        face(number).save(folder / f"{number}.png")
    frame = pl.DataFrame(
        {
            "file": [f"{number}.png" for number in range(COUNT)],
            "ill": ["no", "yes"] * (COUNT // 2),
            "sex": ["f", "f", "m", "m"] * (COUNT // 4),
            "site": ["north", "south", "south"] * (COUNT // 3),
            "part": ["train"] * 8 + ["test"] * 4,
        }
    )
    frame.write_csv(tmp_path / "table.csv")
    return folder


@pytest.fixture
def decoded(monkeypatch):
    """The names that are really decoded, and blocks of four."""
    names = []
    decode = pixels.decode
    monkeypatch.setattr(pixels, "BLOCK_IMAGES", 4)

    def counted(path, **options):
        names.append(path.name)
        return decode(path, **options)

    monkeypatch.setattr(pixels, "decode", counted)
    return names


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))


def edit(path, number, line):
    """Replace a line, counted from 1; None takes it away."""
    lines = path.read_text().splitlines()
    lines[number - 1 : number] = [] if line is None else [line]
    write(path, lines)


def read(folder, **options):
    """`load_images` with the roles of the fixture `album`."""
    place = folder.parent
    options = {"label": "ill", "group": "sex", "size": 16, "cache": place / "cache", **options}
    return load_images(folder, place / "table.csv", **options)


def faces(folder, **options):
    return load_celeba(folder, **{"size": 16, "cache": folder.parent / "cache", **options})


def central(image, size=16, side=None):
    """Plain Pillow, no shortcut: the reference."""
    side = side or min(image.size)
    left, top = ((length - side) / 2 for length in image.size)
    box = (left, top, left + side, top + side)
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC, box))


def test_rows_are_the_pixels_and_the_table(album):
    data = read(album, client="site", split="part")
    assert data.features.shape == (COUNT, 3, 16, 16)
    assert data.features.dtype == np.uint8
    for number in range(COUNT):
        seen = data.features[number].transpose(1, 2, 0)
        np.testing.assert_array_equal(seen, central(face(number)))
    assert data.classes == ("no", "yes")
    assert data.labels.tolist() == [0, 1] * 6
    assert data.group_names == ("f", "m")
    assert data.client_names == ("north", "south")
    assert data.test is not None
    assert data.test.tolist() == [False] * 8 + [True] * 4
    assert data.columns == ("red", "green", "blue")
    assert data.encoder is None
    assert data.name == "table"
    assert any("12 images, of each the largest central square" in note for note in data.notes)
    assert any("positive class: 'yes' (`positive`" in note for note in data.notes)
    assert read(album, positive="no").classes == ("yes", "no")


def test_rows_are_mapped_and_can_be_written_without_harm(album):
    data = read(album)
    assert isinstance(data.features, np.memmap)
    assert data.features.transpose(0, 2, 3, 1).flags.c_contiguous
    before = data.features[0].copy()
    data.features[0] = 7
    np.testing.assert_array_equal(read(album).features[0], before)


def test_a_missing_group_is_not_recorded(album):
    edit(album.parent / "table.csv", 2, "0.png,no,,north,train")
    data = read(album, group=["sex", "site"])
    assert data.groups[0] == -1
    assert data.group_names[0] == "f & north"


@pytest.mark.parametrize(("width", "height", "crop"), [(30, 30, None), (31, 24, 20), (24, 37, 24)])
def test_crop(album, width, height, crop):
    """Cropping first differs at the rim, where the filter then has nothing to look at: 2 pixels."""
    image = face(3, width, height)
    image.save(album / "0.png")
    seen = read(album, crop=crop, image="file").features[0].transpose(1, 2, 0)
    np.testing.assert_array_equal(seen, central(image, side=crop))
    side = crop or 30
    left = (width - side) / 2
    top = (height - side) / 2
    if left % 1 == 0 and top % 1 == 0:
        cut = image.crop((int(left), int(top), int(left) + side, int(top) + side))
        plain = np.asarray(cut.resize((16, 16), Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(seen[2:-2, 2:-2], plain[2:-2, 2:-2])


def test_a_large_jpeg_is_reduced_well(album):
    """Decoding at a quarter of the size moves a smooth picture by less than two levels."""
    slope = np.linspace(0, 255, 1500)[:, None] * np.ones(1200)
    image = Image.fromarray(np.stack([slope, 255 - slope, slope / 2], -1).astype(np.uint8))
    image.save(album / "0.png", "JPEG", quality=95)
    seen = read(album).features[0].transpose(1, 2, 0).astype(int)
    assert np.abs(seen - central(image)).max() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(album, orientation):
    """Turned after the resizing; which axis is resized first moves a level or two by rounding."""
    image = face(5, 31, 24)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(album / "0.png", exif=exif)
    with Image.open(album / "0.png") as stored:
        turned = ImageOps.exif_transpose(stored)
    seen = read(album).features[0].transpose(1, 2, 0).astype(int)
    assert np.abs(seen - central(turned)).max() <= 2


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK"])
def test_modes(album, mode):
    image = Image.new("RGB", (20, 20), (255, 255, 255)).convert(mode)
    image.save(album / "0.png", "TIFF" if mode == "CMYK" else "PNG")
    assert (read(album).features[0] == 255).all()


def test_sixteen_bits_and_transparent_palettes(album):
    Image.fromarray(np.full((20, 20), 0x8040, np.uint16)).save(album / "0.png")
    palette = Image.new("P", (20, 20), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(album / "1.png", transparency=b"\x00\xff")
    Image.new("F", (20, 20)).save(album / "2.png", "TIFF")
    data = read(album, skip_bad=True)
    assert (data.features[0] == 0x80).all()
    assert data.features[1, :, 5, 5].tolist() == [10, 20, 30]
    assert len(data) == COUNT - 1


def spoil(album):
    """A truncated picture, a text, a missing one."""
    face(4).save(album / "4.png", "JPEG")
    cut = (album / "4.png").read_bytes()
    (album / "4.png").write_bytes(cut[: len(cut) // 2])
    (album / "6.png").write_text("no picture")
    (album / "9.png").unlink()


def test_bad_images(album, decoded):
    spoil(album)
    with pytest.raises(FedgftError, match=r"1 of 12 .* '9\.png' \(no such file\).*skip_bad"):
        read(album)
    assert decoded == []  # what is missing is known before
    data = read(album, skip_bad=True, client="site", split="part")
    kept = [number for number in range(COUNT) if number not in (4, 6, 9)]
    assert data.labels.tolist() == [number % 2 for number in kept]
    for row, number in enumerate(kept):
        np.testing.assert_array_equal(data.features[row].transpose(1, 2, 0), central(face(number)))
    again = read(album, skip_bad=True, client="site", split="part")
    assert again.notes == data.notes
    assert len(decoded) == COUNT - 1
    assert any("3 of 12 images" in note and "'4.png' (damaged: " in note for note in data.notes)


def test_bad_images_are_remembered(album, decoded):
    (album / "6.png").write_text("no picture")
    for _ in range(2):
        with pytest.raises(FedgftError, match=r"1 of 12 .* '6\.png' \(not an image\)"):
            read(album)
    assert len(decoded) == COUNT
    face(6).save(album / "6.png")
    assert len(read(album)) == COUNT


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (range(COUNT), {}, "12 of 12 .*none is left"),
        (range(0, COUNT, 2), {}, "6 of 12 .*class 'no' has no image left"),
        ((2, 3, 6, 7, 10, 11), {}, "group 'm' has no image left"),
        ((8, 9, 10, 11), {"split": "part"}, "split 'test' has no image left"),
    ],
)
def test_losses_through_bad_images_are_errors(album, bad, options, message):
    for number in bad:
        (album / f"{number}.png").write_bytes(b"")
    with pytest.raises(FedgftError, match=message):
        read(album, skip_bad=True, **options)


@pytest.mark.parametrize("side", [40, 50])  # Pillow warns of the first and refuses the second
def test_a_picture_that_would_fill_the_memory_is_bad(album, monkeypatch, side):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    face(2, side, side).save(album / "2.png")
    with pytest.raises(FedgftError, match=r"'2\.png' \(more pixels than are safe to decode"):
        read(album)


def test_a_crop_larger_than_an_image(album):
    with pytest.raises(FedgftError, match=r"0\.png: 30 x 36 pixels are too few for crop 31"):
        read(album, crop=31, skip_bad=True)


@pytest.mark.parametrize("options", [{"size": 7}, {"size": 1025}, {"crop": 0}])
def test_sizes(album, options):
    with pytest.raises(FedgftError, match=r"^(size|crop) .*must be"):
        read(album, **options)


@pytest.mark.parametrize(
    "name", ["/etc/0.png", "../0.png", "a/../../0.png", "a\\..\\0.png", "C:0.png"]
)
def test_names_stay_in_the_folder(album, name):
    edit(album.parent / "table.csv", 3, f"{name},yes,f,south,train")
    with pytest.raises(FedgftError, match=r"table\.csv: image column 'file' leads out"):
        read(album)


def test_the_column_of_names(album):
    (album / "below").mkdir()
    (album / "0.png").rename(album / "below" / "0.png")
    edit(album.parent / "table.csv", 1, "picture,ill,sex,site,part")
    edit(album.parent / "table.csv", 2, "below/0.png,no,f,north,train")
    with pytest.raises(FedgftError, match=r"no column is called image, .*image"):
        read(album)
    with pytest.raises(FedgftError, match=r"'pictures' \(image\); did you mean 'picture'"):
        read(album, image="pictures")
    with pytest.raises(FedgftError, match="column 'sex' \\(image\\) has another role"):
        read(album, image="sex")
    assert len(read(album, image="picture")) == COUNT
    edit(album.parent / "table.csv", 2, ",no,f,north,train")
    with pytest.raises(FedgftError, match="image column 'picture' lacks 1 file name"):
        read(album, image="picture")
    with pytest.raises(FedgftError, match="nowhere: no such folder"):
        load_images(
            album / "nowhere", album.parent / "table.csv", label="ill", group="sex", image="part"
        )


def test_the_cache_is_used_until_an_image_changes(album, decoded):
    first = read(album)
    assert len(decoded) == COUNT
    second = read(album)
    assert len(decoded) == COUNT
    np.testing.assert_array_equal(first.features, second.features)
    face(99).save(album / "3.png")
    changed = read(album).features[3].transpose(1, 2, 0)
    np.testing.assert_array_equal(changed, central(face(99)))
    read(album, size=8)
    read(album, crop=20)
    assert len(decoded) == 4 * COUNT


def interrupt(at):
    def on_progress(what, done, total):
        if done == at:
            raise KeyboardInterrupt

    return on_progress


def test_an_interrupted_decode_goes_on(album, decoded):
    (album / "1.png").write_text("no picture")
    with pytest.raises(KeyboardInterrupt):
        read(album, on_progress=interrupt(8))
    assert sorted(decoded) == sorted(f"{number}.png" for number in range(8))
    decoded.clear()
    seen = []
    data = read(album, skip_bad=True, on_progress=lambda *step: seen.append(step))
    assert sorted(decoded) == ["10.png", "11.png", "8.png", "9.png"]
    assert seen == [("decoding images", 8, 12), ("decoding images", 12, 12)]
    assert len(data) == COUNT - 1
    for row, number in enumerate([0, *range(2, COUNT)]):
        np.testing.assert_array_equal(data.features[row].transpose(1, 2, 0), central(face(number)))


def test_decoded_images_are_their_owners_alone(album):
    old = os.umask(0o022)
    try:
        read(album)
    finally:
        os.umask(old)
    cache = album.parent / "cache"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in cache.iterdir()} == {".pixels", ".journal"}
    assert {path.stat().st_mode & 0o777 for path in cache.iterdir()} == {0o600}


@pytest.mark.parametrize("harm", ["torn line", "wrong byte", "short part"])
def test_a_half_done_cache_is_not_trusted(album, decoded, harm):
    """Of two finished blocks the first stays; the journal's own line tells that of the second."""
    with pytest.raises(KeyboardInterrupt):
        read(album, on_progress=interrupt(8))
    (journal,), (part,) = ((album.parent / "cache").glob(f"*.{end}") for end in ("journal", "part"))
    if harm == "torn line":
        journal.write_bytes(journal.read_bytes()[:-9])
    elif harm == "short part":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        content = bytearray(part.read_bytes())
        content[-5] ^= 1
        part.write_bytes(content)
    decoded.clear()
    data = read(album)
    assert len(decoded) == 8
    np.testing.assert_array_equal(data.features[5].transpose(1, 2, 0), central(face(5)))


@pytest.mark.parametrize("harm", ["byte", "short", "empty", "gone", "journal", "other journal"])
def test_a_damaged_cache_is_decoded_anew(album, decoded, harm):
    whole = read(album).features.copy()
    (journal,), (file,) = ((album.parent / "cache").glob(f"*.{e}") for e in ("journal", "pixels"))
    content = file.read_bytes()
    if harm == "byte":
        file.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    elif harm in ("short", "empty"):
        file.write_bytes(content[: -1 if harm == "short" else 0])
    elif harm == "gone":
        file.unlink()
    else:
        journal.write_text(
            '["?"]' if harm == "journal" else '{"key": "another"}\n{"finished": 1}\n'
        )
    np.testing.assert_array_equal(read(album).features, whole)
    assert len(decoded) == 2 * COUNT
    read(album)
    assert len(decoded) == 2 * COUNT


def test_a_touched_but_whole_cache_is_kept(album, decoded):
    read(album)
    (file,) = (album.parent / "cache").glob("*.pixels")
    file.touch()
    read(album)
    assert len(decoded) == COUNT


def test_a_full_disk(album, decoded, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(FedgftError, match=r"cache.*No space.*cac"):
        patch.setattr(pixels.os, "fsync", full)
        read(album)
    assert len(read(album)) == COUNT
    assert len(decoded) == COUNT


def test_a_cache_that_cannot_be_written(album):
    (album.parent / "file").touch()
    with pytest.raises(FedgftError, match="file/cache: the cache folder cannot be written"):
        read(album, cache=album.parent / "file" / "cache")


def test_an_unreadable_image_is_no_bad_image(album, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, pytest.raises(FedgftError, match="png: cannot be read"):
        patch.setattr(Image, "open", denied)
        read(album, skip_bad=True)
    assert len(read(album)) == COUNT


def test_without_pillow(album, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(FedgftError, match=r"fedgft\[images\]"):
        patch.setitem(sys.modules, "PIL", None)
        read(album)
    read(album)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert len(read(album)) == COUNT  # the cache needs none


SECOND = """
import sys
from pathlib import Path
from fedgft.data.images import load_images
assert "PIL" not in sys.modules, "imported too early"
place = Path(sys.argv[1])
said = lambda what, done, total: print(what, flush=True)
data = load_images(place / "pictures", place / "table.csv", label="ill", group="sex", size=16,
                   cache=place / "cache", on_progress=said)
print(data.features.sum())
"""


@pytest.mark.slow
def test_a_second_process_waits(album):
    """It starts when the first has begun, and decodes nothing itself."""
    others = []

    def on_progress(what, done, total):
        if not others:
            command = [sys.executable, "-c", SECOND, str(album.parent)]
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert others[0].stdout.readline().startswith("waiting: another process")

    data = read(album, on_progress=on_progress)
    rest, _ = others[0].communicate(timeout=60)
    assert rest.split() == [str(data.features.sum())]


def test_celeba(celeba):
    data = faces(celeba)
    numbers = [number for number in range(COUNT) if part_of(number) != 1]
    assert data.name == "celeba"
    assert data.classes == ("not Smiling", "Smiling")
    assert data.labels.tolist() == [signs_of(number)[2] for number in numbers]
    assert data.group_names == ("not Male", "Male")
    assert data.groups.tolist() == [signs_of(number)[1] for number in numbers]
    assert data.test is not None
    assert data.test.tolist() == [part_of(number) == 2 for number in numbers]
    assert data.clients is None
    assert data.notes[0] == "celeba: the 2 images of the official validation part are left out"
    for row, number in enumerate(numbers):
        with Image.open(celeba / "img_align_celeba" / f"{number + 1:06}.jpg") as image:
            np.testing.assert_array_equal(data.features[row].transpose(1, 2, 0), central(image))


def test_celeba_validation_part(celeba):
    train = faces(celeba, valid="train").test
    test = faces(celeba, valid="test").test
    assert train is not None
    assert test is not None
    assert train.tolist() == [False] * 9 + [True] * 3
    assert test.tolist() == [False] * 7 + [True] * 5


def test_celeba_intersections(celeba):
    data = faces(celeba, label="Smiling", group="Young, Male", valid="train")
    assert data.group_names == (
        "not Young & not Male",
        "not Young & Male",
        "Young & not Male",
        "Young & Male",
    )
    assert data.groups.tolist() == [2 * signs_of(n)[3] + signs_of(n)[1] for n in range(COUNT)]
    swapped = faces(celeba, label="Male", group=("Smiling",), valid="train")
    assert swapped.classes == ("not Male", "Male")
    assert swapped.group_names == ("not Smiling", "Smiling")


def test_celeba_identities_are_clients(celeba):
    edit(celeba / "identity_CelebA.txt", 1, "000001.jpg 10\n999999.jpg 77")  # more is no harm
    data = faces(celeba, client="identity", valid="train")
    assert data.client_names == ("7", "8", "9", "10")
    assert data.clients is not None
    assert data.clients.tolist() == [3 - number // 3 for number in range(COUNT)]


def test_celeba_in_the_folders_of_its_archive(celeba):
    for name, place in (
        ("img_align_celeba", "Img"),
        ("list_attr_celeba.txt", "Anno"),
        ("list_eval_partition.txt", "Eval"),
    ):
        (celeba / place).mkdir()
        (celeba / name).rename(celeba / place / name)
    assert len(faces(celeba)) == COUNT - 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label": "Smilling"}, r"no attribute 'Smilling' \(label\); did you mean 'Smiling'"),
        ({"group": "Male,Yong"}, r"no attribute 'Yong' \(group\); did you mean 'Young'"),
        ({"group": "Smiling"}, "'Smiling' is both label and group"),
        ({"client": "Male"}, "client Male: .*'identity'"),
        ({"valid": "keep"}, "valid keep: must be one of drop, train, test"),
    ],
)
def test_celeba_options(celeba, options, message):
    with pytest.raises(FedgftError, match=message):
        faces(celeba, **options)


ATTR = "list_attr_celeba.txt"
PART = "list_eval_partition.txt"
WHO = "identity_CelebA.txt"


@pytest.mark.parametrize(
    ("file", "number", "line", "message"),
    [
        (ATTR, 1, "11", "line 1 must hold the number of images, 12, not '11'"),
        (ATTR, 1, "many", "line 1 must hold the number of images, 12, not 'many'"),
        (ATTR, 2, "Male Male Smiling Young", "line 2 names attribute 'Male' more than once"),
        (ATTR, 5, "000003.jpg 1 1 1", "line 5 must hold a file name and 4 values, each 1 or -1"),
        (ATTR, 5, "000003.jpg 1 1 0 1", "line 5 must hold a file name and 4 values, each 1 or -1"),
        (ATTR, 5, "000001.jpg 1 1 1 1", "line 5 names '000001.jpg' a second time"),
        (ATTR, 5, "000099.jpg 1 1 1 1", "line 3 names '000003.jpg', which list_attr"),
        (PART, 4, None, "no line for '000004.jpg', which is on line 6 of list_attr"),
        (PART, 4, "999999.jpg 0", "line 4 names '999999.jpg', which list_attr"),
        (PART, 12, "000012.jpg 2\n999999.jpg 2", "line 13 names '999999.jpg', which list_attr"),
        (PART, 4, "000004.jpg 3", "line 4 must hold a file name and a part, 0, 1 or 2, not"),
        (PART, 4, "000003.jpg 0", "line 4 names '000003.jpg' a second time"),
        (WHO, 4, "000004.jpg Ann", "line 4 must hold a file name and the number of a person"),
        (WHO, 4, None, "no line for '000004.jpg'"),
    ],
)
def test_celeba_lists_with_faults(celeba, file, number, line, message):
    edit(celeba / file, number, line)
    with pytest.raises(FedgftError, match=message) as caught:
        faces(celeba, client="identity")
    assert str(celeba) in str(caught.value)


@pytest.mark.parametrize("name", [ATTR, PART, WHO, "img_align_celeba"])
def test_celeba_missing_files(celeba, name):
    (celeba / name).rename(celeba / "elsewhere")
    with pytest.raises(FedgftError, match=f"celeba: no {name} there; .*as its authors give it"):
        faces(celeba, client="identity")


def test_celeba_without_images(celeba):
    write(celeba / ATTR, ["0", " ".join(ATTRIBUTES)])
    write(celeba / PART, [])
    with pytest.raises(FedgftError, match="leave no image at all"):
        faces(celeba)


def test_celeba_names_stay_in_the_folder(celeba):
    for file in (ATTR, PART):
        path = celeba / file
        path.write_text(path.read_text().replace("000003.jpg", "../3.jpg"))
    with pytest.raises(FedgftError, match=r"leads out of the folder with '\.\./3\.jpg'"):
        faces(celeba)


def test_celeba_bad_images(celeba):
    (celeba / "img_align_celeba" / "000002.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(FedgftError, match=r"1 of 10 images .* the first: '000002\.jpg'"):
        faces(celeba)
    assert len(faces(celeba, skip_bad=True)) == COUNT - 3
